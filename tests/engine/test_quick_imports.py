"""Quicker imports find what thorough ones find."""

import importlib.metadata

from mint.engine.quick_imports import distributions_of_packages, quick_imports


def test_every_package_is_found_with_its_distributions() -> None:
    thorough = importlib.metadata.packages_distributions()
    quick = distributions_of_packages()
    assert "numpy" in quick
    assert {package: sorted(set(quick[package])) for package in thorough} == {
        package: sorted(set(names)) for package, names in thorough.items()
    }


def test_the_library_is_itself_again_afterwards() -> None:
    thorough = importlib.metadata.packages_distributions
    with quick_imports():
        assert importlib.metadata.packages_distributions is distributions_of_packages
    assert importlib.metadata.packages_distributions is thorough
