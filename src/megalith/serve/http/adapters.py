"""LoRA adapters by name: which requests may have, and vLLM's protocol to load and unload them while the server runs.

The protocol is off unless the server has a folder for it (`--lora-dir`), and reads nothing that is not in that folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megalith.errors import MegalithError
from megalith.nn.lora import Adapter
from megalith.serve.http.errors import ApiError, printable, refusal
from megalith.serve.http.settings import MOST_ADAPTERS, name_problem
from megalith.serve.worker import Worker
from megalith.tokenizers.chat_template import ChatFormat


@dataclass
class AdapterNames:
    """The adapters of a server, which loads and unloads them.

    Attributes:
        numbers: name -> number in the engine; it grows with each load, so that no two adapters ever have the same.
        folder: In which clients may load adapters; None: they may not.
        read: Reads a folder of adapters.
        format_of: Returns the chat format of adapters in a folder; None for that of the model.
        formats: Number in the engine -> its chat format, of those that have one of their own.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    folder: Path | None = None
    read: Callable[[Path], Mapping[str, Adapter]] | None = None
    format_of: Callable[[Path], ChatFormat | None] = lambda folder: None
    formats: dict[int, ChatFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._last, self._loading = max(self.numbers.values(), default=0), asyncio.Lock()

    async def load(self, worker: Worker, name: str, path: str, *, replace: bool = False) -> None:
        """Load adapters from a folder in `folder`. `ApiError` 403, 404 or 400 if that is refused."""
        folder = self._require_folder()
        if (wrong := name_problem(name)) is not None:
            raise refusal("lora_name", wrong)
        found = (folder / path).resolve() if "\0" not in path else folder.parent
        if not found.is_relative_to(folder.resolve()):
            raise ApiError(403, "lora_path: is not in the folder of --lora-dir", "lora_path", "path_not_allowed")
        async with self._loading:
            if name in self.numbers and not replace:
                raise refusal("lora_name", f"{name} has already been loaded; unload it, or set load_inplace to true")
            if len(self.numbers) >= MOST_ADAPTERS and name not in self.numbers:
                raise refusal("lora_name", f"{MOST_ADAPTERS} adapters are loaded; unload one of them")
            if not found.is_dir():
                raise ApiError(404, f"lora_path: no adapter found for {printable(path)}", "lora_path", "not_found")
            assert self.read is not None
            try:
                adapters = await asyncio.to_thread(self.read, found)
                chat = await asyncio.to_thread(self.format_of, found)
            except MegalithError as error:
                raise refusal("lora_path", printable(str(error), 500)) from None
            self._last += 1
            number, before = self._last, self.numbers.get(name)
            await worker.call(lambda engine: engine.add_adapters(number, adapters))
            self.numbers[name] = number
            if chat is not None:
                self.formats[number] = chat
            if before is not None:
                self.formats.pop(before, None)
                await worker.call(lambda engine: engine.remove_adapters(before))

    async def unload(self, worker: Worker, name: str) -> None:
        """Unload adapters; requests that run with them end as they would. `ApiError` 403 or 404."""
        self._require_folder()
        async with self._loading:
            if name not in self.numbers:
                raise ApiError(404, f"lora_name: there is no adapter {printable(name)}", "lora_name", "model_not_found")
            number = self.numbers.pop(name)
            self.formats.pop(number, None)
            await worker.call(lambda engine: engine.remove_adapters(number))

    def _require_folder(self) -> Path:
        if self.folder is None:
            said = "adapters are loaded at the start alone; start the server with --lora-dir DIR to load those in DIR"
            raise ApiError(403, said, None, "adapters_are_fixed")
        return self.folder
