"""What people look at: figures, the report of a run, and the dashboard.

| file | what is in it |
|---|---|
| theme | Look: light and dark, colours, captions, and the kinds of charts that there are |
| figures | figures_of(run, phase, theme): what dashboard, report and notebook show |
| figures_evolution | Phase 2: generations, diversity, combinations, lineage, gains |
| figures_phases | Phases 3 to 8: what only one of them measures |
| report, report.html | write_report: one HTML file that loads nothing from anywhere |
| dashboard | pages in a browser |
"""
