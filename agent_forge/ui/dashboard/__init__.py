"""The dashboard in a browser: pages that read runs, and start, stop and resume them as processes.

Whatever stands in a run's files is shown as plain text, never as Markdown or HTML. Each number is
from these files, or of this machine now; one that was not measured is `-`.

| file | what is in it |
|---|---|
| app | the script that streamlit runs for every look at a page |
| state | what the pages share: runs that are read, the sidebar, problems, figures |
| overview | a card of each phase; stop and resume |
| phases | one phase: figures, metrics, tables, models |
| evolution | Phase 2 as it goes |
| models | the registered models: filter, card, lineage, two side by side |
| playground | conversations with one model or two |
| system | this machine, with alarms |
| configuration | settings: edit, check, start |
| comparison | several runs side by side |
"""
