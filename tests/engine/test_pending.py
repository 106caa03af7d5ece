"""Modules not imported yet: verified from the file, patched when they come."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from patchkit.engine import install, installations
from patchkit.engine.errors import DuringImportError, PreflightError, VerificationError

from .conftest import Toys, patch, reviewed, rollout


def new(x=1):
    return "new"


UP = "def f(x=1): return 'old'\n"


def hooks() -> list[str]:
    return [type(f).__name__ for f in sys.meta_path if type(f).__name__ == "ImportWatch"]


def test_it_waits_for_the_import_and_patches_before_anyone_takes_an_alias(mk: Toys) -> None:
    name = mk.write(UP)
    user = mk.write(f"from {name} import f as fast\n")
    inst = install(rollout(patch(f"{name}:f", new)), "rollout")
    assert inst.state == "pending"
    assert name not in sys.modules, "verifying did not import it"
    before = inst.manifest.digest
    inst.verify()
    module = importlib.import_module(user)
    assert inst.state == "active"
    assert module.fast() == "new"
    assert inst.manifest.digest == before, "comparable before and after"
    assert "exec_module" not in vars(sys.modules[name].__spec__.loader), "the loader is as ever"
    inst.verify()
    inst.uninstall()
    assert module.fast() == "old"
    assert hooks() == []


def test_parents_are_not_imported(mk: Toys) -> None:
    mk.write("raise RuntimeError('imported')\n", name="waitpkg.__init__")
    mk.write(UP, name="waitpkg.deep")
    with install(rollout(patch("waitpkg.deep:f", new)), "rollout") as inst:
        assert inst.state == "pending"
        assert "waitpkg" not in sys.modules


STATIC = [
    ("def f(x=1, *, extra): return 1", "adds extra|lacks extra"),
    ("def g(x=1): return 1", "not there"),
    ("async def f(x=1): return 1", "runs in another way"),
    ("def f(x=1:", "source cannot be read|not there"),
]


@pytest.mark.parametrize(("source", "match"), STATIC)
def test_it_is_verified_from_the_file_first(mk: Toys, source: str, match: str) -> None:
    name = mk.write(source)
    with pytest.raises(PreflightError, match=match):
        install(rollout(patch(f"{name}:f", new)), "rollout")
    assert name not in sys.modules
    assert hooks() == []


def test_reviewed_digests_are_asked_before_the_import(mk: Toys) -> None:
    name = mk.write(UP)
    ours = mk.write("def f(x=1): return 'new'\n")
    adapter = rollout(patch(f"{name}:f", f"{ours}:f"), reviewed=reviewed(f"{name}:f"))
    with install(adapter, "rollout") as inst:
        assert ours not in sys.modules, "the replacement may need what is not imported yet"
        assert inst.unreviewed == {}
        assert importlib.import_module(name).f() == "new"
    mk.write("def f(x=1): return 'changed'\n", name=name)
    sys.modules.pop(name)
    with pytest.raises(PreflightError, match="changed since it was reviewed"):
        install(adapter, "rollout")


def test_failure_there_undoes_everything_and_raises_out_of_the_import(mk: Toys) -> None:
    ready = mk(UP)
    before = ready.f
    name = mk.write("def f(x=1): return 'old'\nf = __import__('functools').partial(f, 2)\n")
    adapter = rollout(patch(f"{ready.__name__}:f", new), patch(f"{name}:f", new))
    inst = install(adapter, "rollout")
    assert ready.f() == "new"
    with pytest.raises(DuringImportError, match=r"was waiting for .* does not fit it") as caught:
        importlib.import_module(name)
    assert not isinstance(caught.value, ImportError), "`except ImportError` must not swallow it"
    assert ready.f is before
    assert inst.state == "undone"
    assert name not in sys.modules
    assert hooks() == []
    assert installations() == []


def test_a_module_whose_own_import_fails_stays_awaited(mk: Toys) -> None:
    name = mk.write("def f(x=1): return 'old'\n1 / 0\n")
    with install(rollout(patch(f"{name}:f", new)), "rollout") as inst:
        with pytest.raises(ZeroDivisionError):
            importlib.import_module(name)
        assert inst.state == "pending"
        mk.write(UP, name=name)
        sys.modules.pop(name, None)
        assert importlib.import_module(name).f() == "new"


def test_a_module_loaded_past_the_import_system_is_noticed(mk: Toys) -> None:
    name = mk.write(UP)
    with install(rollout(patch(f"{name}:f", new)), "rollout") as inst:
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(name, mk.root / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        with pytest.raises(VerificationError, match="loaded past the import system"):
            inst.verify()


def test_waiting_is_over_with_the_installation(mk: Toys) -> None:
    name = mk.write(UP)
    install(rollout(patch(f"{name}:f", new)), "rollout").uninstall()
    assert hooks() == []
    assert importlib.import_module(name).f() == "old"


def test_imports_in_threads_while_installing(mk: Toys) -> None:
    for _ in range(15):
        name = mk.write("import time; time.sleep(0.002)\n" + UP)
        adapter = rollout(patch(f"{name}:f", new))
        thread = threading.Thread(target=importlib.import_module, args=(name,))
        thread.start()
        with install(adapter, "rollout") as inst:
            thread.join()
            assert inst.state == "active"
            assert sys.modules[name].f() == "new"
            inst.verify()
        assert sys.modules[name].f() == "old"


def test_from_inside_the_import_of_its_own_target_is_refused(mk: Toys) -> None:
    mk.write(
        """
        from patchkit.engine import Adapter, Patch, install
        def g(x=1): return 'new'
        def go():
            import inner_target
        """,
        name="inner_installer",
    )
    mk.write(
        """
        def f(x=1): return 'old'
        from patchkit.engine import Adapter, Patch, install
        from patchkit.engine.errors import PreflightError
        patch = Patch(symbol='inner_target:f', action='replace', replacement=lambda x=1: 1,
                      reason='r', consequence='c', until='u')
        try:
            install(Adapter(name='inner', rollout=(patch,)), 'rollout')
        except PreflightError as error:
            message = str(error)
        """,
        name="inner_target",
    )
    target = importlib.import_module("inner_target")
    assert "being imported by this very thread" in target.message


def test_one_loader_for_several_modules(mk: Toys, monkeypatch: Any) -> None:
    """As with zip files: the hook must not take the other module for the awaited one."""
    from importlib.machinery import ModuleSpec

    awaited, other = mk.write(UP), mk.write("y = 1\n")

    class Shared:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if name not in (awaited, other):
                return None
            return ModuleSpec(name, self, origin=str(mk.root / f"{name}.py"))

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            if module.__name__ == awaited:
                importlib.import_module(other)
            exec(
                compile((mk.root / f"{module.__name__}.py").read_text(), "x", "exec"), vars(module)
            )

    monkeypatch.setattr(sys, "meta_path", [Shared(), *sys.meta_path])
    patched = patch(f"{awaited}:f", new)
    inst = install(rollout(patched), "rollout")
    with pytest.raises(DuringImportError, match="somebody else has patched it"):
        importlib.import_module(awaited)  # its code says it comes from a file called "x"
    assert inst.state == "undone"
    assert sys.modules[other].y == 1


def test_a_zip_file_has_no_source_to_verify_and_is_refused(mk: Toys, monkeypatch: Any) -> None:
    import zipfile

    archive = mk.root / "toys.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_target.py", UP)
    monkeypatch.syspath_prepend(str(archive))
    with pytest.raises(PreflightError, match="its source cannot be read"):
        install(rollout(patch("zipped_target:f", new)), "rollout")


def test_a_spawned_process_has_nothing_and_says_so(mk: Toys) -> None:
    up = mk(UP)
    code = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(mk.root)!r})
        import multiprocessing as mp
        import {up.__name__}, spawned_adapter
        def child(queue):
            from patchkit.engine import exact_context, installations
            try:
                exact_context()
            except Exception as error:
                message = str(error)
            queue.put(({up.__name__}.f(), len(installations()), message))
        def installing(queue):
            inst = spawned_adapter.install()
            queue.put(({up.__name__}.f(), inst.manifest.digest))
        if __name__ == '__main__':
            inst = spawned_adapter.install()
            context = mp.get_context('spawn')
            queue = context.Queue()
            for target in (child, installing):
                process = context.Process(target=target, args=(queue,))
                process.start(); print(queue.get()); process.join()
            print(inst.manifest.digest)
        """
    )
    (mk.root / "spawned_adapter.py").write_text(
        textwrap.dedent(
            f"""
            from patchkit.engine import Adapter, Patch
            import patchkit.engine
            def g(x=1): return 'new'
            adapter = Adapter(name='spawned', rollout=(Patch(
                symbol='{up.__name__}:f', action='replace', replacement='spawned_adapter:g',
                reason='r', consequence='c', until='u'),))
            def install():
                return patchkit.engine.install(adapter, 'rollout')
            """
        )
    )
    (mk.root / "main_spawn.py").write_text(code)
    out = subprocess.run(
        [sys.executable, str(mk.root / "main_spawn.py")], capture_output=True, text=True, timeout=60
    )
    lines = out.stdout.splitlines()
    assert len(lines) == 3, out.stderr
    assert "'old', 0" in lines[0] and "spawned or remote worker has to call" in lines[0]
    assert lines[1].startswith("('new'")
    assert lines[2] in lines[1], "both processes have the same manifest digest"
