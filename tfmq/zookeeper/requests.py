"""The requests of a coordinator, as calls of kazoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfmq.errors import NotAllowed
from tfmq.zookeeper.connection import in_words, results
from tfmq.zookeeper.nodes import Children, Create, Cut, Delete, Node, Read, ReadAll, Request, Write

if TYPE_CHECKING:
    from kazoo.client import KazooClient


def ask(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    """The answer to `request`, see `tfmq.zookeeper.nodes`. Raises Cut, NotAllowed."""
    from kazoo import exceptions

    try:
        return _ask(client, request, watch)
    except (exceptions.NoAuthError, exceptions.AuthFailedError) as error:
        raise NotAllowed(
            f"ZooKeeper does not allow the use of {_path(request)} ({in_words(error)}); tfmq brings no credentials."
        ) from error
    except (exceptions.KazooException, exceptions.ZookeeperError) as error:
        raise Cut(repr(error)) from error


def _path(request: Request) -> str:
    return ", ".join(request.paths) if isinstance(request, ReadAll) else request.path


def _ask(client: KazooClient, request: Request, watch: Callable[[Any], None]) -> Any:
    if isinstance(request, Children):
        return _one(client.get_children_async(request.path, watch), [])
    if isinstance(request, Read):
        return _node(_one(client.get_async(request.path, watch)))
    if isinstance(request, ReadAll):
        return [_node(_known(each)) for each in results([client.get_async(path) for path in request.paths])]
    if isinstance(request, Write):
        return _one(client.set_async(request.path, request.data)) is not None
    if isinstance(request, Create):
        return _create(client, request)
    return _delete(client, request)


def _create(client: KazooClient, request: Create) -> Node | None:
    from kazoo.exceptions import NodeExistsError

    asked = client.create_async(request.path, request.data, ephemeral=True, makepath=True, include_data=True)
    made = results([asked])[0]
    if isinstance(made, NodeExistsError):
        return None
    return _node((request.data, _known(made)[1]))


def _delete(client: KazooClient, request: Delete) -> bool:
    """In one transaction with a look at the node that must be there."""
    from kazoo.exceptions import NoNodeError

    transaction = client.transaction()
    transaction.check(request.beside, -1)
    transaction.delete(request.path, request.version)
    beside, deleted = _known(results([transaction.commit_async()])[0])
    if isinstance(deleted, NoNodeError):
        return True
    return not isinstance(beside, BaseException) and not isinstance(deleted, BaseException)


def _one(asked: Any, missing: Any = None) -> Any:
    """The answer; `missing` where there is no node."""
    answer = _known(results([asked])[0])
    return missing if answer is None else answer


def _known(answer: Any) -> Any:
    """The answer; None where there is no node. Raises what else went wrong."""
    from kazoo.exceptions import NoNodeError

    if isinstance(answer, NoNodeError):
        return None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _node(answer: Any) -> Node | None:
    if answer is None:
        return None
    data, state = answer
    return Node(data or b"", state.ephemeralOwner, state.czxid, state.version)
