"""What to do about the patches that could not be judged."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator

from patchkit.audit._findings import Finding, VerdictKind
from patchkit.audit._versions import Target, Versions, download


def hints(findings: Iterable[Finding], versions: Versions) -> tuple[str, ...]:
    """One sentence for each version that left patches unjudged: why, and what helps."""
    targets = {t.label: t for asked in versions.asked.values() for t in asked}
    unjudged: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for finding in findings:
        for verdict in finding.verdicts:
            if verdict.kind is not VerdictKind.UNKNOWN:
                continue
            if verdict.version in targets:
                unjudged[verdict.version] += 1
            elif finding.package not in sys.stdlib_module_names:
                missing[finding.package] += 1
    return tuple(_sentences(unjudged, missing, targets))


def _sentences(
    unjudged: Counter[str], missing: Counter[str], targets: dict[str, Target]
) -> Iterator[str]:
    for label, count in unjudged.items():
        target = targets[label]
        if target.source is None:
            yield (
                f"{label}: {count} {_patches(count)} not judged, since a stored manifest holds "
                "selected symbols only; for all of them: "
                f"{download(target.package, target.version)}, then name the wheel"
            )
    if missing:
        names = ", ".join(sorted(missing))
        count = missing.total()
        yield (
            f"{count} {_patches(count)} of what is not installed here not judged ({names}): "
            "name a wheel or a folder of it with --against"
        )


def _patches(count: int) -> str:
    return "patch" if count == 1 else "patches"
