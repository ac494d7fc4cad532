"""What people look at: figures, the report of a run, and the dashboard.

| file | what is in it |
|---|---|
"""
