"""Rules across settings: small named predicates, each with the message that names the flags, the values and a remedy.

A rule speaks only when every setting that it needs is there and readable, so that one mistake gives one message.
`RULES` concern the configuration alone, `FILE_RULES` (of `file_rules`) also look at the file system; `NOTICES` are no
violations but say what has no effect.
"""

from __future__ import annotations

from megalith.config.bert_rules import BERT_NOTICES, BERT_RULES
from megalith.config.checkpoint_rules import CHECKPOINT_NOTICES, CHECKPOINT_RULES
from megalith.config.data_rules import DATA_NOTICES, DATA_RULES
from megalith.config.expert_layout_rules import EXPERT_LAYOUT_NOTICES, EXPERT_LAYOUT_RULES
from megalith.config.expert_rules import EXPERT_NOTICES, EXPERT_RULES
from megalith.config.file_rules import paths_are_local
from megalith.config.latent_rules import LATENT_NOTICES, LATENT_RULES
from megalith.config.launch_rules import LAUNCH_NOTICES, LAUNCH_RULES
from megalith.config.layout_rules import LAYOUT_NOTICES, LAYOUT_RULES
from megalith.config.log_rules import LOG_NOTICES, LOG_RULES
from megalith.config.model_rules import MODEL_NOTICES, MODEL_RULES
from megalith.config.mup_rules import MUP_NOTICES, MUP_RULES
from megalith.config.optimizer_rules import OPTIMIZER_NOTICES, OPTIMIZER_RULES
from megalith.config.prediction_rules import PREDICTION_NOTICES, PREDICTION_RULES
from megalith.config.recompute_rules import RECOMPUTE_NOTICES, RECOMPUTE_RULES
from megalith.config.rule import Rule
from megalith.config.schedule_rules import SCHEDULE_NOTICES, SCHEDULE_RULES
from megalith.config.t5_rules import T5_NOTICES, T5_RULES
from megalith.config.tokenizer_rules import TOKENIZER_NOTICES, TOKENIZER_RULES
from megalith.config.training_rules import TRAINING_NOTICES, TRAINING_RULES

RULES: tuple[Rule, ...] = (
    paths_are_local,
    *MODEL_RULES,
    *LATENT_RULES,
    *MUP_RULES,
    *PREDICTION_RULES,
    *EXPERT_RULES,
    *TRAINING_RULES,
    *SCHEDULE_RULES,
    *OPTIMIZER_RULES,
    *DATA_RULES,
    *TOKENIZER_RULES,
    *CHECKPOINT_RULES,
    *LAYOUT_RULES,
    *EXPERT_LAYOUT_RULES,
    *LAUNCH_RULES,
    *RECOMPUTE_RULES,
    *LOG_RULES,
    *BERT_RULES,
    *T5_RULES,
)

NOTICES: tuple[Rule, ...] = (
    *DATA_NOTICES,
    *TOKENIZER_NOTICES,
    *MODEL_NOTICES,
    *LATENT_NOTICES,
    *MUP_NOTICES,
    *PREDICTION_NOTICES,
    *EXPERT_NOTICES,
    *TRAINING_NOTICES,
    *SCHEDULE_NOTICES,
    *OPTIMIZER_NOTICES,
    *LAYOUT_NOTICES,
    *EXPERT_LAYOUT_NOTICES,
    *LAUNCH_NOTICES,
    *CHECKPOINT_NOTICES,
    *RECOMPUTE_NOTICES,
    *LOG_NOTICES,
    *BERT_NOTICES,
    *T5_NOTICES,
)
