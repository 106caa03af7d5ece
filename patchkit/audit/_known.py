"""What is known beforehand about foreign names: settings, and libraries that patch."""

from __future__ import annotations

import re

from patchkit.audit._values import (
    Bound,
    Const,
    Func,
    Klass,
    Map,
    Ref,
    Result,
    Seq,
    Value,
    last_name,
    options,
)

# Attributes that describe an object and change nothing about what it does.
DESCRIPTIVE = frozenset({
    "__doc__", "__name__", "__module__", "__qualname__", "__signature__", "__annotations__",
    "__text_signature__", "__wrapped__", "__all__", "argtypes", "restype", "errcheck",
})  # fmt: skip

# Places that exist to be written to. Reassigning a name of `sys` or an entry of
# `os.environ` configures the process; it replaces nobody's code.
_SETTING_PLACES = re.compile(
    r"^(?:linecache\.|sys\.(?!modules)|warnings\.|logging\.(?:raiseExceptions|root)|builtins\._$"
    r"|torch\.backends\.|socket\.(?:_?default)|matplotlib\.|mpl\.|pylab\.|seaborn\."
    r"|pandas\.(?:options|set_option)|readline\.|faulthandler\.|gettext\.|locale\."
    r"|decimal\.|random\.|numpy\.random\.|csv\.|PIL\.ImageFile\.LOAD_TRUNCATED_IMAGES"
    r"|PIL\.Image\.MAX_IMAGE_PIXELS|openai\.(?:api_key|api_base|base_url|organization)"
    r"|multiprocessing\.|torch\.multiprocessing\.|ctypes\.|numpy\.set_)"
)
_SETTING_MODULES = frozenset({
    "config", "_config", "configs", "settings", "options", "rcParams", "flags", "FLAGS", "conf",
    "knobs",
})  # fmt: skip


def is_setting(target: Ref, name: str, value: Value) -> bool:
    """Whether writing `value` to `target.name` only configures something."""
    if name in DESCRIPTIVE:
        return True
    dotted = f"{target.dotted}.{name}"
    if dotted.startswith("os.environ"):
        return not holds_code(value)
    if _SETTING_PLACES.match(dotted):
        return True
    if any(part in _SETTING_MODULES for part in dotted.split(".")[1:-1]):
        return not holds_code(value)
    return False


def holds_code(value: Value) -> bool:
    """Whether a value is a function or a class, if inside of a descriptor or a wrapper."""
    return any(
        isinstance(v, (Func, Klass, Bound))
        or (isinstance(v, Result) and any(holds_code(a) for a in v.args))
        for v, _ in options(value)
    )


def is_code(value: Value) -> bool:
    """Whether a value is, or may be, a function or a class."""
    return any(
        isinstance(v, (Func, Klass, Ref)) or (not isinstance(v, (Const, Seq, Map)) and bool(v))
        for v, _ in options(value)
    )


def is_plain(value: Value) -> bool:
    """Whether a value is certainly a plain constant or a container of them."""
    found = options(value)
    return bool(found) and all(_plain(v) for v, _ in found)


def _plain(value: Value) -> bool:
    if isinstance(value, Const):
        return True
    if isinstance(value, Seq):
        return all(is_plain(v) for v in value.items)
    if isinstance(value, Map):
        return all(is_plain(k) and is_plain(v) for k, v in value.items)
    if isinstance(value, Result) and last_name(value) == "iadd":
        return all(is_plain(a) for a in value.args)  # `x.count += 1`
    return False


# name of a function -> where the module, the name and the wrapper stand in its call.
# All of them replace ``module.name`` by something that calls ``wrapper``.
WRAPPING_CALLS: dict[str, tuple[int, int, int]] = {
    "wrap_function_wrapper": (0, 1, 2),
    "wrap_object": (0, 1, 2),
    "wrap_object_attribute": (0, 1, 2),
    "wrap_out_function": (0, 1, 2),
    "wrap_in_function": (0, 1, 2),
    "wrap_post_function": (0, 1, 2),
    "wrap_pre_function": (0, 1, 2),
    "wrap_method": (0, 1, 2),
    "_wrap": (0, 1, 2),
    "wrap": (0, 1, 2),
    "_w": (0, 1, 2),
    "_wrap_function_wrapper": (0, 1, 2),
}
WRAPPING_LIBRARIES = frozenset({
    "wrapt", "ddtrace", "opentelemetry", "newrelic", "elasticapm", "sentry_sdk", "openinference",
    "aws_xray_sdk", "scout_apm", "instana", "logfire", "langfuse", "traceloop",
})  # fmt: skip
WRAPPER_CLASSES = frozenset({
    "FunctionWrapper", "BoundFunctionWrapper", "ObjectProxy", "CallableObjectProxy",
    "PartialCallableObjectProxy",
})  # fmt: skip

# Methods by which registries take entries. The registry is a class or an object, never
# a module: functions such as `atexit.register` are a library's way of being used.
REGISTERING = re.compile(
    r"^(?:register|register_(?:module|model|class|cls|oot|backend|parser|tool_parser|processor"
    r"|reasoning_parser|config|tokenizer|loader|connector|kernel|attention|function|fn|op"
    r"|lazy_module|quantization_config|speculator|platform|executor|handler)|add_entry)$"
)
# What inherits these methods from the standard library is no registry of the package.
NOT_REGISTRIES = frozenset({
    "abc", "collections", "atexit", "codecs", "numbers", "signal", "typing", "weakref",
    "selectors", "copyreg", "email", "click", "typer", "argparse", "fastapi", "flask", "django",
    "sqlalchemy", "pytest", "prometheus_client", "faulthandler", "webbrowser", "builtins",
    "functools", "dask", "pydantic", "asyncio", "concurrent", "unittest", "logging", "gradio",
})  # fmt: skip

# Operator namespaces that exist before the project is imported.
EXISTING_NAMESPACES = frozenset({
    "aten", "prims", "c10d", "_c10d_functional", "c10d_functional", "quantized", "prim",
    "torchvision", "torchaudio", "fbgemm", "inductor", "higher_order", "rngprims", "xformers",
    "flash_attn", "vllm", "_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_vllm_fa2_C",
    "_vllm_fa3_C", "vllm_aiter", "sgl_kernel", "_rocm_C", "_C_utils", "_qutlass_C",
})  # fmt: skip

# Arguments and entries through which workers come into a project.
DOORS = frozenset({
    "worker_process_setup_hook", "worker_process_setup_hooks", "worker_extension_cls",
    "worker_cls",
})  # fmt: skip

# Parts of packages that other packages put there when they are imported.
BROUGHT_BY_OTHERS = {
    "torch": frozenset({"npu", "mlu", "musa", "hpu", "gcu", "sdaa", "ptpu"}),
}


def dotted_ref(text: str) -> Ref | None:
    """The place that a dotted name in a string points at."""
    text = text.replace(":", ".")
    parts = text.split(".")
    if not parts or not all(p.isidentifier() for p in parts):
        return None
    return Ref(parts[0], tuple(parts[1:]))


def looks_like_registry(target: Ref) -> bool:
    """Whether the last name is that of a class or of an object that is written in capitals."""
    if not target.attrs or target.root in NOT_REGISTRIES:
        return False
    name = target.attrs[-1].lstrip("_")
    return bool(name) and (name[0].isupper() or "registry" in name.lower())
