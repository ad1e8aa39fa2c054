import pytest

from tests.core.stories import make_engine


@pytest.fixture
def engine():
    return make_engine()
