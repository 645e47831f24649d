"""lm-evaluation-harness with `--model megalith` registered: `python -m megalith.evaluate.lm_eval`.

For versions of lm-eval without plugins; all arguments are lm-eval's own.
"""

from __future__ import annotations

import sys

from megalith.errors import MegalithError, install_command


def main() -> int:
    """Run lm-eval and return its exit code."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"lm-eval is not installed ({error}): {install_command('eval')}", file=sys.stderr)
        return 2
    import lm_eval.models  # noqa: F401  # registers lm-eval's own, which it does not do itself once there is another

    import megalith.evaluate.harness  # noqa: F401  # registers the model
    from megalith.evaluate.harness import leave_ranks

    try:
        cli_evaluate()
        leave_ranks()
    except MegalithError as error:
        print(f"megalith: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
