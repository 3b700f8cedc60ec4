"""MODEL by name: what is loaded, what is drawn again with the same seed, what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autosp.model_spec import BadModel, ModelSpec, load

FACTORIES = Path(__file__).parent / "factories.py"


def test_a_factory_gives_the_same_weights_always_and_another_batch_for_another_index() -> None:
    spec = ModelSpec(f"{FACTORIES}:attention")
    (model, inputs), (again, same), (other, different) = spec(0), spec(0), spec(1)
    for p, q, r in zip(model.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p, r) and p.dtype == torch.float64
    assert isinstance(inputs, dict) and isinstance(same, dict) and isinstance(different, dict)
    assert torch.equal(inputs["x"], same["x"]) and not torch.equal(inputs["x"], different["x"])
    assert inputs["x"].dtype == torch.float64


def test_the_dtype_option_applies_to_factories_and_families() -> None:
    model, inputs = ModelSpec(f"{FACTORIES}:positional", dtype="float32")(0)
    assert isinstance(inputs, tuple) and inputs[0].dtype == next(model.parameters()).dtype == torch.float32
    model, _ = ModelSpec("llama", 16, 1, "float32")(0)
    assert next(model.parameters()).dtype == torch.float32


def test_a_family_takes_length_and_batch() -> None:
    _, inputs = ModelSpec("llama", seq_len=21, batch=3)(0)
    assert isinstance(inputs, dict) and inputs["input_ids"].shape == (3, 21)


def test_a_package_factory_is_loaded_by_its_dotted_name() -> None:
    assert load("factories:attention").__name__ == "attention"
    assert load("torch.nn.functional:relu") is torch.nn.functional.relu


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{FACTORIES}:not_a_pair", r"must return \(module, inputs\), it returned Attention"),
        (f"{FACTORIES}:nothing", "has no function 'nothing'"),
        ("nowhere.py:f", "no such file: .*nowhere.py"),
        ("no.such.package:f", "cannot import no.such.package"),
        ("builtins:list", r"must return \(module, inputs\), it returned list"),
    ],
)
def test_a_wrong_name_is_an_error_that_says_what_is_missing(name: str, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        ModelSpec(name)(0)
