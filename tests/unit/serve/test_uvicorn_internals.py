"""Canaries for what the server uses of uvicorn beyond its documented interface; each says what a new version broke."""

from __future__ import annotations

import ast
import inspect

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from megalith.serve.http import server


def attributes_of(kind: type) -> set[str]:
    """What a class defines, and what its methods set on `self`."""
    tree = ast.parse(inspect.getsource(kind))
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return set(dir(kind)) | {node.attr for node in stored if ast.unparse(node.value) == "self"}


def test_a_connection() -> None:
    used = {"transport", "conn", "config", "connections", "cycle", "flow", "loop", "connection_made", "data_received"}
    used |= {"connection_lost", "pause_writing", "resume_writing", "send_400_response"}
    missing = used - attributes_of(H11Protocol)
    assert not missing, f"uvicorn's H11Protocol has no {missing}: serve/http/server.py overrides or reads it"
    assert list(inspect.signature(H11Protocol.send_400_response).parameters) == ["self", "msg"]


def test_a_request() -> None:
    missing = {"response_complete", "disconnected", "message_event"} - attributes_of(RequestResponseCycle)
    assert not missing, f"uvicorn's RequestResponseCycle has no {missing}: serve/http/server.py ends a request by it"
    assert "read_paused" in attributes_of(FlowControl), "uvicorn's FlowControl says otherwise whether reading is paused"


def test_a_refusal_is_sent_while_the_error_is_handled() -> None:
    tree = ast.parse(inspect.getsource(H11Protocol))
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    calls = [node for handler in handlers for node in ast.walk(handler) if isinstance(node, ast.Attribute)]
    assert any(node.attr == "send_400_response" for node in calls), "sys.exc_info() in it no longer tells the status"


def test_a_server() -> None:
    used = {"capture_signals", "force_exit", "should_exit", "started", "server_state"}
    missing = used - attributes_of(uvicorn.Server)
    assert not missing, f"uvicorn.Server has no {missing}: serve/http/server.py stops it by them"
    assert hasattr(uvicorn.Server(uvicorn.Config(lambda: None)).server_state, "connections")
    assert issubclass(server._Server, uvicorn.Server)
