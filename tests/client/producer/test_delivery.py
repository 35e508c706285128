"""What deliveries wait with: each face only in its own way."""

import pytest

from tests.client.producer.test_core import CoreRig
from tfmq.client.producer.delivery import AsyncDeliveryOwner, BlockingDeliveryOwner
from tfmq.errors import NotAllowed


def test_each_api_variant_refuses_the_other_ones_way() -> None:
    core = CoreRig().core
    with pytest.raises(NotAllowed, match=r"tfmq\.aio"):
        BlockingDeliveryOwner(core).wait_async([])
    with pytest.raises(NotAllowed, match="await the delivery"):
        AsyncDeliveryOwner(core).wait_for([], None)


def test_waiting_takes_the_batches_along() -> None:
    rig = CoreRig()
    delivery = rig.run(rig.core.send("orders", rig.core.make_message("orders", b"x"), b"x"))
    rig.core.owner.wait_for([delivery[0]], 5.0)
    assert delivery.done()
