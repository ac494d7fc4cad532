"""An honest champion: what counts nothing, who is chosen at the end, and what it is compared with."""

from __future__ import annotations
