"""`megalith push FOLDER ORG/NAME`: upload of an exported model to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch

from megalith.cli.arguments import CommandParser
from megalith.config.rules.file import is_huggingface
from megalith.config.values import local_path
from megalith.errors import ConfigError
from megalith.hub import PREFIX, UPLOADED_FILES, push
from megalith.train.streams import warn


def make_parser() -> CommandParser:
    """Build the parser."""
    parser = CommandParser(
        prog="megalith push",
        description="Upload the folder that `megalith checkpoint export` wrote. The token is that of `hf auth login`, "
        "or HF_TOKEN.",
    )
    add = parser.add_argument
    add("folder", type=local_path, metavar="FOLDER", help="Hugging Face model folder, or folder with a .gguf")
    add("repo", metavar="ORG/NAME", help="model repository, made if it does not exist")
    add("--private", action="store_true", help="if the repository is made: make it private")
    add("--revision", metavar="BRANCH", help="branch, made if it does not exist (default: main)")
    add("--message", metavar="TEXT", help="commit message")
    return parser


def run(argv: Sequence[str]) -> int:
    """Upload a folder and print the URL of the commit."""
    options = make_parser().parse_args(argv)
    folder = options.folder
    if not is_huggingface(folder) and not any(folder.glob("*.gguf")):
        raise ConfigError(
            f"{folder} holds neither config.json and safetensors nor a .gguf; `megalith checkpoint export DIR OUT` "
            "writes such a folder"
        )
    names = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    if left_out := [name for name in names if not any(fnmatch(name, pattern) for pattern in UPLOADED_FILES)]:
        warn(f"note: not uploaded: {', '.join(left_out)} (only {', '.join(UPLOADED_FILES)})")
    repo = options.repo.removeprefix(PREFIX)
    print(push(folder, repo, private=options.private, revision=options.revision, message=options.message))
    return 0
