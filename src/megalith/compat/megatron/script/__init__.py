"""Launch scripts of bash, read without a shell: which program they start, with which words.

Nothing of a script is run. Assignments, arrays, `export` and `${VARIABLE:-default}` are followed; what only a shell
could know, such as the output of a command, is left as it stands and said.
"""

from megalith.compat.megatron.script.bash import Script, read_script
from megalith.compat.megatron.script.launch import Launch, find_launch

__all__ = ["Launch", "Script", "find_launch", "read_script"]
