"""GPUs by name: the words around it do not matter, and what it says of a GPU is what selection knows."""

from __future__ import annotations

import pytest

from scan_registry.cli.errors import UsageError
from scan_registry.cli.gpus import product_of
from scan_registry.hardware.device import cuda_of_driver, described
from scan_registry.hardware.products import PRODUCTS, named, names
from scan_registry.hardware.target import FIRST_CUDA, OLDEST, SHARED_MEMORY


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("dgx spark", "GB10"),
        ("NVIDIA Jetson AGX Thor", "Thor"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("5090", "RTX 5090"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("Tesla V100-SXM2-16GB", "V100"),
    ],
)
def test_names_as_people_and_drivers_write_them(text: str, name: str) -> None:
    result = named(text)
    assert result is not None
    assert result.name == name


@pytest.mark.parametrize("text", ["", "nvidia", "80GB", "H1000", "RTX 4090 Laptop GPU", "sm_90"])
def test_no_gpu_is_guessed(text: str) -> None:
    """A laptop's RTX 4090 has fewer SMs than the one of that name."""
    assert named(text) is None


def test_each_name_is_of_one_gpu() -> None:
    for product in PRODUCTS:
        for name in (product.name, *product.also):
            assert named(name) == product, name
            assert named(f"NVIDIA {name.upper()}") == product, name
    assert len(names()) == len({name.lower() for name in names()})


def test_what_is_known_of_a_product_is_known_of_its_capability() -> None:
    largest = {product.capability: described(product.capability).sm_count for product in PRODUCTS}
    for product in PRODUCTS:
        assert product.sm_count <= largest[product.capability], product
        if product.capability >= OLDEST:
            assert product.capability in SHARED_MEMORY
            assert product.capability in FIRST_CUDA


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("hopper", ["Grace Hopper"]),
        ("RTX 4090 Laptop GPU", ["RTX 4090"]),
        ("NVIDIA GB100", ["GB10"]),
        ("sm_121a", ["sm_121"]),
        ("compute_90", ["sm_90"]),
        ("cc 8.7", ["sm_87"]),
    ],
)
def test_an_unknown_name_gets_near_ones(text: str, near: list[str]) -> None:
    with pytest.raises(UsageError, match=r"did you mean .*\?$") as caught:
        product_of(text)
    for name in near:
        assert name in str(caught.value)


@pytest.mark.parametrize("text", ["0.0", "09.0", "١٠.٣", "９.０", "sm_９０", "9.00", "9.", ".9"])
def test_numbers_that_are_no_capability(text: str) -> None:
    with pytest.raises(UsageError, match="accepted are a GPU's name"):
        product_of(text)


def test_drivers_are_given_in_plain_digits() -> None:
    assert cuda_of_driver("575") == (12, 9)
    with pytest.raises(ValueError, match="neither a CUDA version nor a driver's"):
        cuda_of_driver("٥٧٥")


def test_a_name_that_is_like_none_gets_all() -> None:
    with pytest.raises(UsageError) as caught:
        product_of("xyzzy")
    for product in PRODUCTS:
        assert product.name in str(caught.value)
