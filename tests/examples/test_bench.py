"""benchmarks/split.py: what it prints and writes, and what it refuses. Times are not looked at; bytes are exact."""

import json

import pytest
import torch
from bench import memory
from bench.store import Store
from split import main

import zbpipe


@pytest.fixture
def bench(capsys, tmp_path):
    def bench(*arguments):
        status = main(["--repeat", "1", "--json", str(tmp_path), *arguments])
        assert status == 0
        found = {path.stem.partition("-")[0]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
        return capsys.readouterr().out, found

    return bench


def test_host_time_has_every_side_and_says_what_it_was_measured_on(bench):
    torch.set_num_threads(2)
    try:
        said, found = bench("--only", "host_time", "--blocks", "1", "2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert max(map(len, said.splitlines())) <= 80
    made, others = found.pop("host_time"), found.pop("operations")["figures"]
    kinds = ("experts, bfloat16", "experts, float32", "convolutions")
    assert others.keys() == {f"{blocks}, {kind}" for blocks in (1, 2) for kind in kinds}
    assert all(sides.keys() == {"unsplit", "zbpipe", "torch"} for sides in others.values())
    assert not found and made["figures"].keys() == {"1", "2"}
    for sides in made["figures"].values():
        assert sides.keys() == {"unsplit", "zbpipe", "torch", "store"}
        assert all(of["first_ms"]["runs"] == 1 and of["ratio"]["median"] > 0 for of in sides.values())
    assert (made["schema"], made["benchmark"], made["zbpipe"]) == (1, "host_time", zbpipe.__version__)
    assert made["torch"] == torch.__version__.partition("+")[0]
    assert made["device"] and made["date"] and made["python"]


def test_memory_fits_a_window_and_its_bytes_are_exact(bench, monkeypatch):
    monkeypatch.setattr(memory, "WIDTH", 64)  # of what is only timed
    said, found = bench("--only", "memory", "--stages", "convolution", "transformer, checkpointed")
    assert max(map(len, said.splitlines())) <= 80
    figures = found["memory"]["figures"]
    assert figures["stages"].keys() == {"convolution", "transformer, checkpointed"}
    assert figures["policies"].keys() == {"transformer, checkpointed"}
    kept = {side: of["bytes"] for side, of in figures["stages"]["transformer, checkpointed"].items()}
    assert [kept[side]["computed"] for side in ("unsplit", "torch", "store", "zbpipe")] == [1, 7, 1, 1]
    assert kept["zbpipe"]["held"] < kept["store"]["held"] and kept["unsplit"]["held"] is None
    assert figures["existing_gradients_ms"].keys() == {"64", "256", "1024"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--blocks", "0"], "'0' is not a number of 1 or more"),
        (["--repeat", "x"], "'x' is not a number of 1 or more"),
        (["--stages", "resnet"], "invalid choice: 'resnet'"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--json", "no/such"], "--json no/such: there is no such folder; make it first"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_patched_torch_is_no_side(capsys):
    with zbpipe.patch(), pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "torch's module is patched, so there is nothing to compare with" in capsys.readouterr().err


def test_the_store_gives_an_ordinary_backwards_gradients():
    torch.manual_seed(0)
    stage = memory.STAGES["transformer"]()
    x = torch.randn(stage.shape)
    stage(x).sum().backward()
    expected = [w.grad for w in stage.parameters()]
    stage.zero_grad()
    store = Store()
    store.prepare(stage)
    for number in range(2):
        given = x.clone().requires_grad_()
        out = stage(given)
        (grad,), groups = store.stage_backward_input([out], [torch.ones_like(out)], [given], None)
        assert grad is not None and len(groups) == 16
        store.stage_backward_weight(None, groups)
        for w, wanted in zip(stage.parameters(), expected, strict=True):
            torch.testing.assert_close(w.grad, (number + 1) * wanted)
