from __future__ import annotations

import inspect
import re

import pytest

from edgekit import errors
from edgekit.errors import EdgeKitError, MissingExtraError, UnsupportedError, UsageError, one_of

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, EdgeKitError) and value is not EdgeKitError
}


def test_the_documented_tree_is_that_of_the_classes() -> None:
    documented = re.findall(r"[├└]── (\w+) +exit (\d)", errors.__doc__ or "")
    assert len(documented) == len(CLASSES) == 7
    for name, code in documented:
        assert CLASSES[name].exit_code == int(code), name


def test_every_error_has_a_code_of_its_own() -> None:
    codes = {name: kind.code for name, kind in CLASSES.items()}
    assert codes == {
        "UsageError": "usage",
        "UnsupportedError": "unsupported",
        "DoesNotFitError": "does_not_fit",
        "CorruptArtifactError": "corrupt",
        "ParityError": "parity",
        "MissingExtraError": "missing_extra",
        "StorageError": "storage",
    }
    assert all(kind.__doc__ for kind in CLASSES.values())


def test_exit_codes_distinguish_what_a_script_must_tell_apart() -> None:
    codes = [kind.exit_code for name, kind in CLASSES.items() if name != "MissingExtraError"]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 8 for code in codes)


def test_errors_are_caught_by_what_they_also_are() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(MissingExtraError, UnsupportedError)
    with pytest.raises(EdgeKitError, match=r"^it is wrong$"):
        raise UsageError("it is wrong")


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    error = MissingExtraError("torch", "export")
    assert str(error) == "torch is not installed; run: pip install 'edgekit[export]'"
    assert (error.code, error.exit_code) == ("missing_extra", 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("lama", "'lama'; known: gpt_neox, llama, qwen3 (did you mean 'llama'?)"),
        ("qwen", "'qwen'; known: gpt_neox, llama, qwen3 (did you mean 'qwen3'?)"),
        ("mamba2-hybrid", "'mamba2-hybrid'; known: gpt_neox, llama, qwen3"),
        ("", "''; known: gpt_neox, llama, qwen3"),
        ("a\nb", r"'a\nb'; known: gpt_neox, llama, qwen3"),
    ],
)
def test_a_wrong_name_comes_with_the_known_ones(value: str, message: str) -> None:
    assert one_of(value, iter(["qwen3", "llama", "gpt_neox"])) == message
