"""Every kernel and operation lowers to CUDA on a machine that has no GPU, in every layout and dtype."""

import pytest

from tests.pallas_kernels import cases, programs, test_lowering

pytestmark = pytest.mark.filterwarnings(cases.DEPRECATED)

OTHERS = [name for name in programs.LAYOUTS if name not in test_lowering.LAYOUTS]


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("name", OTHERS)
def test_paged_operations(name, kernel):
    test_lowering.check_paged_operations(name, kernel)
