"""Registries: lookup, aliases, spellings, taken names, and modules that register their entries when imported."""

import sys

import pytest

from dcnet.registry import Registry, quote


class Fast:
    name = "fast"
    aliases = ("quick",)


def test_entries_are_found_by_name_alias_and_spelling():
    registry = Registry[type]("a speed", normalize=str.lower)
    assert registry.register(Fast) is Fast
    assert registry["fast"] is registry["quick"] is registry["FAST"] is registry["Quick"] is Fast
    assert registry.canonical("QUICK") == "fast"
    assert (list(registry), len(registry), registry.aliases_of("fast")) == (["fast"], 1, ["quick"])
    assert "slow" not in registry
    assert 3 not in registry
    assert registry.get("slow") is None
    assert repr(registry) == "Registry('a speed': fast)"


def test_unknown_name_raises_with_the_nearest_name():
    registry = Registry[type]("a speed", extra=lambda: ["own:<name>"])
    registry.register(Fast)
    message = "unknown speed 'fasd': known are fast, own:<name>; did you mean 'fast'?"
    for kind in (ValueError, KeyError):
        with pytest.raises(kind) as caught:
            registry["fasd"]
        assert str(caught.value) == message
    with pytest.raises(ValueError, match=r"known are fast, own:<name>; did you mean 'quick'\?"):
        registry["quik"]
    with pytest.raises(ValueError, match="unknown speed 3: known are"):
        registry[3]  # type: ignore[index]


def test_taken_name_is_rejected_but_assignment_replaces():
    registry = Registry[object]("a speed", identifiers=True)
    registry.register(Fast)
    for name, aliases in (("fast", ()), ("quick", ()), ("slow", ("fast",))):
        with pytest.raises(ValueError, match="is taken: Fast is a speed of that name"):
            registry.add(name, object(), aliases)
    with pytest.raises(ValueError, match="the name of a speed must be one word of letters, digits and _, not 'a-b'"):
        registry.add("a-b", object())
    registry["fast"] = str
    assert registry["quick"] is str
    del registry["fast"]
    assert "quick" not in registry


def test_functions_are_registered_by_their_own_name():
    registry = Registry[object]("a step")

    @registry.register
    def forward(): ...

    assert registry["forward"] is forward


def test_modules_of_a_package_are_imported_at_the_first_lookup(tmp_path, monkeypatch):
    package = tmp_path / "found_here"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from dcnet.registry import Registry\nnames = Registry('a name', discover=__name__)\n"
    )
    # A module may look a name up while the modules are being imported.
    (package / "first.py").write_text("from found_here import names\nnames.add('one', 1)\nassert 'two' not in names\n")
    (package / "second.py").write_text("from found_here import names\nnames.add('two', names['one'] + 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import found_here

    assert "found_here.first" not in sys.modules
    assert dict(found_here.names) == {"one": 1, "two": 2}


def test_long_values_are_shortened_in_messages():
    assert quote("a" * 300) == repr("a" * 200) + "..."
    assert quote("short") == "'short'"
    assert quote([1]) == "[1]"
