"""What the examples' tests share."""

from tests.faults.conftest import faulty as faulty
