"""The paths of MetaMorphosis."""

from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.paths import Layout


def test_the_nodes_are_where_metamorphosis_has_them() -> None:
    layout, name = Layout("/meta", 7), PartitionName("orders", 3)
    assert layout.master() == "/meta/brokers/ids/7/master"
    assert layout.topic("orders") == f"{layout.topics()}/orders/7-m" == "/meta/brokers/topics/orders/7-m"
    assert (
        layout.member("billing", "m") == f"{layout.members('billing')}/m" == "/meta/consumers/billing/ids/m"
    )
    assert layout.owner("billing", name) == "/meta/consumers/billing/owners/orders/7-3"
    assert layout.offset("billing", name) == "/meta/consumers/billing/offsets/orders/7-3"
    assert layout.row("billing", name) == "/meta/consumers/billing/offsets/orders/7-3/tfmq"


def test_the_root_may_be_the_top() -> None:
    assert Layout("").master() == "/brokers/ids/0/master"
