"""The paths of MetaMorphosis."""

from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.paths import NodePaths


def test_the_nodes_are_where_metamorphosis_has_them() -> None:
    layout, name = NodePaths("/meta", 7), PartitionName("orders", 3)
    assert layout.broker_address() == "/meta/brokers/ids/7/master"
    assert layout.topic("orders") == f"{layout.topics()}/orders/7-m" == "/meta/brokers/topics/orders/7-m"
    assert (
        layout.member("billing", "m") == f"{layout.members('billing')}/m" == "/meta/consumers/billing/ids/m"
    )
    assert layout.owner("billing", name) == "/meta/consumers/billing/owners/orders/7-3"
    assert layout.offset("billing", name) == "/meta/consumers/billing/offsets/orders/7-3"
    assert layout.offset_fields("billing", name) == "/meta/consumers/billing/offsets/orders/7-3/tfmq"


def test_the_root_may_be_the_top() -> None:
    assert NodePaths("").broker_address() == "/brokers/ids/0/master"
