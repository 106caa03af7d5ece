"""One verdict per patch and version.

The judge puts each version's question to the rules. A rule is given a `Case`, yields
verdicts, and knows neither the judge nor the other rules; what several of them need to
know of the project or of other packages is handed to it.
"""

from patchkit.audit._verdicts.case import Subject
from patchkit.audit._verdicts.judge import Judge

__all__ = ["Judge", "Subject"]
