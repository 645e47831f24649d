#!/usr/bin/env python
"""Megatron's dialogue with a text generation server: `text_generation_cli.py HOST:PORT`. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request

_PATIENCE_SECONDS = 600


def _ask(url: str, prompt: str, tokens: int) -> str:
    """What the server says to a prompt, as it is printed."""
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if key := os.environ.get("MEGALITH_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"prompts": [prompt], "tokens_to_generate": tokens}).encode()
    request = urllib.request.Request(url, body, headers, method="PUT")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would see what is asked
    try:
        with opener.open(request, timeout=_PATIENCE_SECONDS) as response:
            return f"Megatron Response: \n{json.loads(response.read())['text'][0]}"
    except urllib.error.HTTPError as error:
        return f"Error {error.code}: {_message(error.read())}"
    except OSError as error:
        return f"Error: {url} cannot be reached: {getattr(error, 'reason', error)}"


def _message(body: bytes) -> str:
    """The text of an error: a JSON string of Megatron's, or `message` in an object."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: {os.path.basename(sys.argv[0])} HOST:PORT     (MEGALITH_API_KEY is sent where it is set)")
        return 0 if {"-h", "--help"} & set(sys.argv) else 2
    url = f"http://{sys.argv[1].removeprefix('http://').rstrip('/')}/api"
    while True:
        try:
            prompt = input("Enter prompt: ")
            number = input("Enter number of tokens to generate: ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        try:
            tokens = int(number)
        except ValueError:
            print(f"{number!r} is not a whole number")
            continue
        try:
            print(_ask(url, prompt, tokens))
        except KeyboardInterrupt:
            print("\nstopped")


if __name__ == "__main__":
    sys.exit(main())
