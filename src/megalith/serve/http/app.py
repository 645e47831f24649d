"""The endpoints, behind the guard."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from megalith import __version__
from megalith.errors import MegalithError
from megalith.serve.http import megatron_api, openai
from megalith.serve.http.errors import ApiError, BadJson, printable, read_json, refusal
from megalith.serve.http.guard import PAGE, App, Guard
from megalith.serve.http.schemas import ChatRequest, CompletionRequest, LoadAdapter, UnloadAdapter, validated
from megalith.serve.http.service import EventStream, Service, merged
from megalith.serve.http.settings import Defaults

_PAGE_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


def build_app(service: Service, defaults: Defaults | None = None) -> App:
    """Return everything that the server answers, as one ASGI application."""
    api = FastAPI(title="Megalith", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (ApiError, HTTPException, MegalithError, Exception):
        api.add_exception_handler(kind, _error_response)
    _add_megatron(api, service, defaults or Defaults())
    _add_openai(api, service)
    _add_status(api, service)
    _add_page(api)
    _add_description(api)

    def served(method: str, path: str, status: int, client: str, seconds: float) -> None:
        service.metrics.served(method, path, status, seconds)
        service.log.access(method, path, status, client, seconds)

    return Guard(api, service.settings, lambda: service.draining, service.check_room, served)


def _add_megatron(api: FastAPI, service: Service, defaults: Defaults) -> None:
    @api.put(
        "/api",
        summary="Megatron's text generation",
        openapi_extra=_body(_described("megatron_request")),
        responses=_ERRORS,
    )
    async def generate(request: Request) -> Response:
        found = await _json(request)
        asked = megatron_api.read(found, defaults)
        if not asked.no_log:
            service.log.megatron_request(request.client.host if request.client else "-", found)
        return _Json(await megatron_api.answer(service, asked, defaults, request.receive))


def _add_openai(api: FastAPI, service: Service) -> None:
    async def answer(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        service.number_of(body.model)
        if body.stream_options is not None and not body.stream:
            raise refusal("stream_options", "needs stream: true")
        plan = await openai.plan(service, body)
        if not body.stream:
            return _Json(await plan.whole(request.receive))
        answers = await openai.submit_all(service, plan.requests)
        return EventStream(service, plan.chunks(merged(service, answers)), answers)

    async def complete(request: Request) -> Response:
        return await answer(validated(CompletionRequest, await _json(request)), request)

    async def chat(request: Request) -> Response:
        return await answer(validated(ChatRequest, await _json(request)), request)

    for path, endpoint, kind in (
        ("/completions", complete, CompletionRequest),
        ("/chat/completions", chat, ChatRequest),
    ):
        extra = _body(_schema(kind))
        api.add_api_route(f"/v1{path}", endpoint, methods=["POST"], openapi_extra=extra, responses=_ERRORS)
        api.add_api_route(path, endpoint, methods=["POST"], include_in_schema=False)

    def described(name: str, number: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "megalith",
            "max_model_len": service.context_length,
            "chat_template": service.chat_of(name).template is not None,
            "continues_prompts": service.encoder_input is None,
            **({"parent": service.settings.model_name} if number else {}),
        }

    @api.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        return _Json({"object": "list", "data": [described(*item) for item in service.models().items()]})

    @api.get("/v1/models/{name:path}", responses=_ERRORS)
    async def one_model(name: str) -> Response:
        return _Json(described(name, service.number_of(name)))

    @api.post("/v1/load_lora_adapter", openapi_extra=_body(_schema(LoadAdapter)), responses=_ERRORS)
    async def load(request: Request) -> Response:
        body = validated(LoadAdapter, await _json(request))
        await service.adapters.load(service.worker, body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @api.post("/v1/unload_lora_adapter", openapi_extra=_body(_schema(UnloadAdapter)), responses=_ERRORS)
    async def unload(request: Request) -> Response:
        body = validated(UnloadAdapter, await _json(request))
        await service.adapters.unload(service.worker, body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _add_status(api: FastAPI, service: Service) -> None:
    async def health() -> Response:
        ready = service.failure is None and not service.draining
        state = "ok" if ready else "failed" if service.failure is not None else "stopping"
        found = {"status": state, "service": "Megalith", "ready": ready}
        return _Json(found, status_code=200 if ready else 503)

    api.add_api_route("/health", health, methods=["GET"], responses={503: {"description": "not ready"}})
    api.add_api_route("/v1/health", health, methods=["GET"], include_in_schema=False)

    @api.get("/metrics", response_class=PlainTextResponse, responses=_ERRORS)
    async def metrics() -> Response:
        text = service.metrics.text(service.worker.stats())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_page(api: FastAPI) -> None:
    folder = files("megalith.serve.http") / "page"
    for path, kind in PAGE.items():
        content = (folder / (path[1:] or "page.html")).read_bytes()
        api.add_route(path, _static(content, kind), include_in_schema=False)

    @api.get("/favicon.ico", include_in_schema=False)
    async def no_icon() -> Response:
        return Response(status_code=204)


def _static(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(_: Request) -> Response:
        headers = {"content-security-policy": _PAGE_POLICY, "x-frame-options": "DENY"}
        return Response(content, media_type=kind, headers=headers)

    return page


def _add_description(api: FastAPI) -> None:
    @api.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        return _Json(describe(api))


def describe(api: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with the schemas of nested request objects."""
    described = api.openapi()
    schemas = described.setdefault("components", {}).setdefault("schemas", {})
    for kind in (CompletionRequest, ChatRequest):
        schemas |= _schema(kind).get("$defs", {})
    return described


@functools.cache
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")


class _Json(JSONResponse):
    """ASCII with sorted keys, as Megatron's were."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


async def _json(request: Request) -> Any:
    """Parse the body of a request, a large one in a thread; `ApiError` 400 if it is not valid JSON."""
    body = await request.body()
    try:
        return read_json(body) if len(body) < 65536 else await asyncio.to_thread(read_json, body)
    except BadJson as error:
        raise ApiError(400, str(error), error.field or "body", "invalid_json") from None


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        shown = f"{request.method} {printable(request.url.path)}"
        said = f"there is no {shown} here" if error.status_code == 404 else f"{shown}: {error.detail}"
        error = ApiError(error.status_code, said, None, None, error.headers)
    elif isinstance(error, MegalithError):
        error = ApiError(503, printable(str(error), 500))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "an error of the server; its console says more")
    return Response(error.content, error.status, error.headers, "application/json")


def _described(part: str) -> dict[str, Any]:
    """Return a part of the OpenAPI description that no class describes: "error" or "megatron_request"."""
    found: dict[str, Any] = json.loads((files("megalith.serve.http") / "openapi.json").read_bytes())[part]
    return found


_ERROR_CONTENT = {"application/json": {"schema": _described("error")}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused", "content": _ERROR_CONTENT},
    "5XX": {"description": "the server is at fault", "content": _ERROR_CONTENT},
}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    described = {name: value for name, value in schema.items() if name != "$defs"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}
