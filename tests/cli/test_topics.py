"""A topic by the name that a person typed."""

import pytest

from tests.cli.conftest import Cli
from tfmq.admin import Admin
from tfmq.cli.topic import find_topic
from tfmq.errors import UnknownTopic
from tools.rigs.live_server import LiveServer


def test_the_nearest_name_is_offered(cli: Cli, broker: LiveServer) -> None:
    cli("topic", "create", "invoices")
    with Admin(broker.address) as admin:
        assert find_topic(admin, "invoices").name == "invoices"
        with pytest.raises(UnknownTopic, match=r"no topic 'invoice'\. Did you mean 'invoices'\?"):
            find_topic(admin, "invoice")
        with pytest.raises(UnknownTopic, match=r"no topic 'zzzzzzzzz'\. `tfmq topic list` has all\.$"):
            find_topic(admin, "zzzzzzzzz")
