"""Tests for the plugin. The comment on each says what becomes of it, in call and teardown: test_plugin.py compares."""

MARKED = """
import asyncio, functools, unittest
import pytest, torch

pytestmark = pytest.mark.no_tensor_leaks
kept = []

def leak(): kept.append(torch.ones(3, 5))

def test_leaks(): leak()  # passed, leaks 60
def test_trains():  # passed
    net = torch.nn.Linear(3, 3)
    net(torch.ones(2, 3)).sum().backward()

def test_cycle():  # passed, leaks 28
    cycle = [torch.ones(7)]
    cycle.append(cycle)

class TestClass:
    def test_of_a_class(self):  # passed, leaks 60
        self.mine = torch.ones(2)
        leak()

    def test_of_a_clean_class(self): self.mine = torch.ones(2)  # passed

class Case(unittest.TestCase):
    def setUp(self): self.mine = torch.ones(2)

    def test_of_a_case(self): leak()  # passed, leaks 60
    def test_of_a_clean_case(self): pass  # passed

@pytest.mark.parametrize("x", [torch.ones(2), torch.ones(3), torch.ones(4)])
def test_parameters(x):  # passed; passed, leaks 12; passed
    y = x * 2
    if len(x) == 3:
        kept.append(y)

@pytest.fixture(scope="session", params=[None, 100])
def mask(request):
    @functools.lru_cache(maxsize=request.param)
    def mask(n): return torch.ones(n)

    return mask

def test_makes_an_entry(mask): mask(3)  # passed; passed
def test_gains_entries(mask): mask(4), mask(5)  # passed; passed
def test_is_not_blind_beside_a_cache(mask): kept.append(mask(6) * 2)  # passed, leaks 24; passed, leaks 24

@pytest.fixture(scope="class")
def data():
    made = [torch.ones(3) for _ in range(3000)]
    yield made
    made.clear()

class TestMemoryOfAFixture:
    def test_leaks_where_it_was(self, data):  # passed, leaks 36000
        data.clear()
        kept.extend(torch.ones(3) for _ in range(3000))

    def test_leaks_once_more(self, data): kept.append(torch.ones(3))  # passed, leaks 12

class TestMemoryOfATornDownFixture:
    def test_uses_it(self, data): pass  # passed

def test_leaks_after_it(): kept.append(torch.ones(3))  # passed, leaks 12

@pytest.fixture(scope="module")
def dropped():
    cycle = [torch.ones(6)]
    cycle.append(cycle)

def test_of_what_a_wider_fixture_leaves_to_the_collector(dropped): pass  # passed
def test_leaves_to_the_collector(dropped):  # passed, leaks 24
    cycle = [torch.ones(6)]
    cycle.append(cycle)

def lost(): return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

nested, other = (pytest.fixture(scope="session", name=name)(lambda: lost()) for name in ("nested", "other"))

# The 48 bytes of both tests' blocks that nothing in sight explains are leaks, the fixtures' are not.
def test_uses_memory_out_of_sight(nested): pass  # passed
def test_leaks_memory_out_of_sight(): kept.append(lost())  # passed, leaks 68
def test_uses_and_leaks_memory_out_of_sight(other): kept.append(lost())  # passed, leaks 68

@pytest.fixture
def x():
    yield 1
    kept.append(torch.ones(11))

def test_of_a_fixture_that_leaks(x): pass  # passed, leaks 44

async def twice(x):
    await asyncio.sleep(0)
    return x * 2

async def test_async(awaited):  # passed
    task = asyncio.ensure_future(twice(awaited))
    assert (await task).sum() == 6

async def test_async_leaks(awaited): kept.append(await twice(awaited))  # passed, leaks 12

def raises():
    x = torch.ones(3)
    raise ValueError(f"of {x}")

def test_fails():  # failed, not judged
    x = torch.ones(3)
    assert x is None

def test_fails_and_leaks():  # failed, not judged
    leak()
    raise AssertionError

@pytest.fixture
def broken():
    x = torch.ones(3)
    raise ValueError(x.shape)

def test_of_a_broken_fixture(broken): pass  # setup failed, not judged

@pytest.fixture
def breaks():
    x = torch.ones(3)
    yield
    raise ValueError(x.shape)

def test_of_a_fixture_that_breaks(breaks): pass  # passed, teardown failed, not judged
def test_skips():  # skipped
    x = torch.ones(3)
    pytest.skip(f"of {x}")

@pytest.mark.xfail
def test_expected():  # xfailed
    x = torch.ones(3)
    assert x is None

def test_raises_as():  # passed
    y = torch.ones(4)
    with pytest.raises(ValueError, match="of") as caught:
        raises()
    assert "of" in str(caught.value) and y.sum() == 4

def test_catches():  # passed
    y = torch.ones(4)
    try:
        raises()
    except ValueError as error:
        assert "of" in str(error) and y.sum() == 4

def test_keeps_an_exception():  # passed, leaks 52
    x = torch.ones(13)
    try:
        raise ValueError(x.shape)
    except ValueError as error:
        kept.append(error)

@pytest.mark.xfail
def test_expected_leak(): leak()  # xpassed, leak expected

@pytest.mark.xfail(raises=ValueError)
def test_of_another_expectation(): leak()  # xpassed, leaks 60
"""
UNMARKED = """
import pytest, torch

no_tensor_leaks = pytest.mark.no_tensor_leaks
net = torch.nn.Linear(2, 2)
adam = torch.optim.Adam(net.parameters())
kept = []

def leak(): kept.append(torch.ones(3, 5))

def test_leaks(): leak()  # passed

@no_tensor_leaks(action="warn")
def test_warns(): leak()  # passed, warns of 60

@no_tensor_leaks(action="ignore")
def test_is_ignored(): leak()  # passed

@no_tensor_leaks(action="ignore")
def test_is_ignored_with_the_fixture(no_tensor_leaks): leak()  # passed

@no_tensor_leaks(allow=[net, adam, lambda t: t.shape == (9,)])
def test_allowed_by_the_marker():  # passed
    net(torch.ones(1, 2)).sum().backward()
    adam.step()
    kept.append(torch.ones(9))

@pytest.mark.parametrize("i", [1, 2])
@no_tensor_leaks(allow=net.parameters())
def test_allowed_by_an_iterator(i):  # passed; passed
    net.zero_grad()
    net(torch.ones(1, 2)).sum().backward()

def test_allowed_by_the_fixture(no_tensor_leaks):  # passed
    leak()
    no_tensor_leaks.allow(kept[-1])

def test_not_allowed_by_the_fixture(no_tensor_leaks):  # passed, leaks 60
    leak()
    kept.append(torch.ones(7))
    no_tensor_leaks.allow(kept[-1])

def test_iterator_allowed_by_the_fixture(no_tensor_leaks):  # passed
    other = torch.nn.Linear(2, 2)
    kept.append(other)
    no_tensor_leaks.allow(other.parameters())

def test_refused_by_the_fixture(no_tensor_leaks):  # failed, not judged
    no_tensor_leaks.allow(torch.ones(2), "weights")

def test_asks_after_a_leak(request):  # passed
    leak()
    request.getfixturevalue("no_tensor_leaks")

def test_asks_before_a_leak(request):  # passed, leaks 60
    request.getfixturevalue("no_tensor_leaks")
    leak()

@no_tensor_leaks(3)
def test_wrong_0(): pass  # setup failed
@no_tensor_leaks(alow=[])
def test_wrong_1(): pass  # setup failed
@no_tensor_leaks(action="eror")
def test_wrong_2(): pass  # setup failed
@no_tensor_leaks(allow="weights")
def test_wrong_3(): pass  # setup failed
"""
SCOPES = """
import pytest, torch

kept = []

@pytest.fixture(scope="SCOPE")
def net():
    net = torch.nn.Linear(3, 3)
    yield net

@pytest.fixture(scope="SCOPE")
def adam(net): return torch.optim.Adam(net.parameters())

@pytest.fixture(scope="SCOPE")
def graph(net):
    return {"loss": net(torch.ones(4, 3)).tanh().sum()}

@pytest.fixture(scope="SCOPE")
def cache():
    return {"rows": []}

@pytest.mark.no_tensor_leaks
class TestIt:
    def test_makes(self, net, adam, graph, cache): pass  # passed
    def test_gains(self, net, adam, cache):  # passed
        net(torch.ones(2, 3)).sum().backward()
        adam.step()
        cache["rows"].append(torch.ones(5))

    def test_is_not_blind(self, net): kept.append(net(torch.ones(2, 3)).detach())  # passed, leaks 24
"""
OF_ASYNC = """
import asyncio, inspect
import pytest, torch

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True

async def make():
    x = torch.ones(3)
    await asyncio.sleep(0)
    yield x
    await asyncio.sleep(0)

@pytest.fixture
def awaited():
    loop, made = asyncio.new_event_loop(), make()
    yield loop.run_until_complete(made.__anext__())
    with pytest.raises(StopAsyncIteration):
        loop.run_until_complete(made.__anext__())
    loop.close()
"""
