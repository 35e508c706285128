"""A process that is a member of a group coordinated by ZooKeeper: it consumes numbers, saves them, and logs that.

    python -m tests.zookeeper.worker ADDRESS MEMBER SESSION_SECONDS PARTITIONS LOG

Each line of the log: from when to when by the monotonic clock, the partition, the generation, the offset, and "out" for
a number that was consumed in that time, "saved" for what the group goes on with since then.
"""

import os
import sys
import time

from tfmq.errors import Fenced, TfmqError
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.zookeeper.group_coordinator import GroupMembership, boot_time
from tfmq.zookeeper.offsets import ZooKeeperOffsets

HANDLING_SECONDS = 0.001
SAVE_EVERY = 5
TOPIC = "orders"
GROUP = "billing"


class Worker:
    def __init__(self, address: str, member: str, seconds: float, partitions: int, log: str) -> None:
        self.coordination = GroupMembership(address, GROUP, member, session_seconds=seconds, on_change=lambda: None)
        self.storage = ZooKeeperOffsets(address)
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.reached: dict[PartitionName, tuple[int, int]] = {}
        self.coordination.set_topics({TOPIC: range(partitions)})

    def run(self) -> None:
        while True:
            share = self.coordination.assignment()
            for name in share.revoked:
                self.save(name)
            self.coordination.release(share.revoked)
            for name, generation in share.assigned.items():
                if name not in share.revoked:
                    self.hand_out(name, generation)
            time.sleep(HANDLING_SECONDS)

    def hand_out(self, name: PartitionName, generation: int) -> None:
        if self.reached.get(name, (0, 0))[0] != generation and not self.claim(name, generation):
            return
        began = boot_time()
        share = self.coordination.assignment()
        if began >= share.until or share.assigned.get(name) != generation:
            return
        known, offset = self.reached[name]
        time.sleep(HANDLING_SECONDS)
        self.write(began, name, generation, offset, "out")
        self.reached[name] = (known, offset + 1)
        if offset % SAVE_EVERY == 0:
            self.save(name)

    def claim(self, name: PartitionName, generation: int) -> bool:
        try:
            kept = self.storage.claim(GROUP, generation, [name]).get(name)
        except TfmqError:
            return False
        self.reached[name] = (generation, 0 if kept is None else kept.offset)
        return True

    def save(self, name: PartitionName) -> None:
        if name not in self.reached:
            return
        generation, offset = self.reached[name]
        began = boot_time()
        try:
            self.storage.save(GROUP, generation, {name: StoredOffset(offset)})
        except Fenced:
            del self.reached[name]
        except TfmqError:
            return
        else:
            self.write(began, name, generation, offset, "saved")

    def write(self, began: float, name: PartitionName, generation: int, offset: int, what: str) -> None:
        now = boot_time()
        line = f"{began:.6f} {now:.6f} {name.partition} {generation} {offset} {what}\n"
        os.write(self.log, line.encode())


if __name__ == "__main__":
    address, member, seconds, partitions, log = sys.argv[1:]
    Worker(address, member, float(seconds), int(partitions), log).run()
