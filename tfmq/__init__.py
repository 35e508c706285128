"""tfmq: a message broker in Python. After `pip install tfmq`, start `tfmq-server`, then:

    with tfmq.Producer() as producer:
        producer.send("greetings", "hello").result()
    for message in tfmq.Consumer(topics="greetings"):
        print(message.text)

Importing this package is fast, because the module of each name is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfmq import aio as aio
    from tfmq import codecs as codecs
    from tfmq import dead_letters as dead_letters
    from tfmq import errors as errors
    from tfmq import hooks as hooks
    from tfmq import sql as sql
    from tfmq import twisted as twisted
    from tfmq.admin import Admin as Admin
    from tfmq.client.consumer.message import ReceivedMessage as ReceivedMessage
    from tfmq.client.send.batch import Deliveries as Deliveries
    from tfmq.client.send.batch import Delivery as Delivery
    from tfmq.client.send.partitioner import PartitionSelector as PartitionSelector
    from tfmq.client.send.partitioner import StrictPartitions as StrictPartitions
    from tfmq.client.transaction.check_back import InDoubt as InDoubt
    from tfmq.client.worker.listeners import Reject as Reject
    from tfmq.client.worker.listeners import RetryLater as RetryLater
    from tfmq.consumer import Consumer as Consumer
    from tfmq.embedded import local_server as local_server
    from tfmq.errors import Abandoned as Abandoned
    from tfmq.errors import BadFrame as BadFrame
    from tfmq.errors import BadRequest as BadRequest
    from tfmq.errors import Busy as Busy
    from tfmq.errors import Closed as Closed
    from tfmq.errors import ConfigError as ConfigError
    from tfmq.errors import ConnectionFailed as ConnectionFailed
    from tfmq.errors import Damaged as Damaged
    from tfmq.errors import DecodeFailed as DecodeFailed
    from tfmq.errors import DeliveryFailed as DeliveryFailed
    from tfmq.errors import DiskFull as DiskFull
    from tfmq.errors import Fenced as Fenced
    from tfmq.errors import Forbidden as Forbidden
    from tfmq.errors import GroupFenced as GroupFenced
    from tfmq.errors import GroupIncomplete as GroupIncomplete
    from tfmq.errors import GroupStale as GroupStale
    from tfmq.errors import HeuristicOutcome as HeuristicOutcome
    from tfmq.errors import LoginFailed as LoginFailed
    from tfmq.errors import LogTruncated as LogTruncated
    from tfmq.errors import MessageTooLarge as MessageTooLarge
    from tfmq.errors import NotAllowed as NotAllowed
    from tfmq.errors import NotARecord as NotARecord
    from tfmq.errors import NotPrimary as NotPrimary
    from tfmq.errors import NotSupported as NotSupported
    from tfmq.errors import OffsetOutOfRange as OffsetOutOfRange
    from tfmq.errors import SequenceGap as SequenceGap
    from tfmq.errors import ServerError as ServerError
    from tfmq.errors import StaleEpoch as StaleEpoch
    from tfmq.errors import StaleProducer as StaleProducer
    from tfmq.errors import StorageStopped as StorageStopped
    from tfmq.errors import StoreFailed as StoreFailed
    from tfmq.errors import TfmqError as TfmqError
    from tfmq.errors import TimedOut as TimedOut
    from tfmq.errors import TopicExists as TopicExists
    from tfmq.errors import TransactionCommitted as TransactionCommitted
    from tfmq.errors import TransactionError as TransactionError
    from tfmq.errors import TransactionExists as TransactionExists
    from tfmq.errors import TransactionRolledBack as TransactionRolledBack
    from tfmq.errors import TransactionState as TransactionState
    from tfmq.errors import TransactionTooLarge as TransactionTooLarge
    from tfmq.errors import UnknownCommand as UnknownCommand
    from tfmq.errors import UnknownPartition as UnknownPartition
    from tfmq.errors import UnknownProducer as UnknownProducer
    from tfmq.errors import UnknownSchedule as UnknownSchedule
    from tfmq.errors import UnknownTopic as UnknownTopic
    from tfmq.errors import UnknownTransaction as UnknownTransaction
    from tfmq.errors import VersionMismatch as VersionMismatch
    from tfmq.hooks import Hook as Hook
    from tfmq.message import Message as Message
    from tfmq.message import Ordinal as Ordinal
    from tfmq.message import Partition as Partition
    from tfmq.message import SendResult as SendResult
    from tfmq.offsets.storage import OffsetStorage as OffsetStorage
    from tfmq.offsets.storage import PartitionName as PartitionName
    from tfmq.offsets.storage import StoredOffset as StoredOffset
    from tfmq.producer import Producer as Producer
    from tfmq.transactions import Transaction as Transaction
    from tfmq.transactions import XAResource as XAResource


_MODULES = ("aio", "codecs", "dead_letters", "errors", "hooks", "sql", "twisted")
_ERRORS = (
    "Abandoned BadFrame BadRequest Busy Closed ConfigError ConnectionFailed Damaged DecodeFailed"
    " DeliveryFailed DiskFull Fenced Forbidden GroupFenced GroupIncomplete GroupStale HeuristicOutcome"
    " LoginFailed LogTruncated"
    " MessageTooLarge NotARecord NotAllowed NotPrimary NotSupported OffsetOutOfRange SequenceGap ServerError"
    " StaleEpoch StaleProducer StorageStopped StoreFailed TfmqError TimedOut TopicExists TransactionCommitted"
    " TransactionError TransactionExists TransactionRolledBack TransactionState TransactionTooLarge"
    " UnknownCommand UnknownPartition UnknownProducer UnknownSchedule UnknownTopic UnknownTransaction"
    " VersionMismatch"
).split()
_DEFINED_IN: dict[str, str] = {
    "Admin": "tfmq.admin",
    "Consumer": "tfmq.consumer",
    "Deliveries": "tfmq.client.send.batch",
    "Delivery": "tfmq.client.send.batch",
    "Hook": "tfmq.hooks",
    "InDoubt": "tfmq.client.transaction.check_back",
    "Message": "tfmq.message",
    "OffsetStorage": "tfmq.offsets.storage",
    "Ordinal": "tfmq.message",
    "Partition": "tfmq.message",
    "PartitionName": "tfmq.offsets.storage",
    "PartitionSelector": "tfmq.client.send.partitioner",
    "Producer": "tfmq.producer",
    "ReceivedMessage": "tfmq.client.consumer.message",
    "Reject": "tfmq.client.worker.listeners",
    "RetryLater": "tfmq.client.worker.listeners",
    "SendResult": "tfmq.message",
    "StoredOffset": "tfmq.offsets.storage",
    "StrictPartitions": "tfmq.client.send.partitioner",
    "Transaction": "tfmq.transactions",
    "XAResource": "tfmq.transactions",
    "local_server": "tfmq.embedded",
    **dict.fromkeys(_ERRORS, "tfmq.errors"),
}

__version__ = "0.1.0"
__all__ = ["__version__", *_MODULES, *_DEFINED_IN]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tfmq.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'tfmq' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_DEFINED_IN[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
