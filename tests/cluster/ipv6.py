"""Mark of tests that listen on IPv6 addresses."""

import pytest

from cluster.config.network import listen_error

NEEDS_IPV6 = pytest.mark.skipif(listen_error("::1", 0) is not None, reason="the machine has no ::1")
