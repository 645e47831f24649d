"""The settings of what is printed and recorded."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting


@dataclass(frozen=True)
class LogConfig:
    """What is printed and recorded."""

    log_interval: int = setting(100, help="iterations between lines", unit="iterations", at_least=1)
    log_throughput: bool = setting(False, help="add TFLOP/s to the line")
    log_params_norm: bool = setting(False, help="add the norm of the parameters to the line")
    log_num_zeros_in_grad: bool = setting(False, help="add the number of zeros in the gradient to the line")
    log_straggler: bool = setting(False, help="report ranks that the others wait for, every --log-interval")
    straggler_minmax_count: int = setting(
        1, help="with --log-straggler: slowest and fastest ranks that are named", unit="ranks", at_least=1
    )
    tensorboard_dir: str | None = setting(None, help="folder of TensorBoard files")
    tensorboard_log_interval: int = setting(
        1, help="iterations between TensorBoard records", unit="iterations", at_least=1
    )
