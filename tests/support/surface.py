"""The command line, frozen: each command with its options and arguments."""

from __future__ import annotations

SURFACE = {
    "run": [
        *(
            "--config",
            "--dry-run",
            "--from",
            "--json",
            "--models",
            "--only",
            "--preset",
            "--progress",
        ),
        *("--session", "--set", "--storage"),
    ],
    "resume": ["--from", "--json", "--only", "--progress", "--set", "--storage", "session"],
    "stop": ["--storage", "session"],
    "status": ["--json", "--metrics", "--storage", "session"],
    "logs": ["--events", "--follow", "--json", "--storage", "-f", "session"],
    "phases": ["--json"],
    "report": ["--json", "--out", "--storage", "session"],
    "export": [
        "--bundle",
        "--dry-run",
        "--dtype",
        "--force",
        "--json",
        "--storage",
        "name",
        "target",
    ],
    "quantize": [
        *("--activation-bits", "--codec", "--data", "--dry-run", "--embedding", "--force"),
        *("--json", "--rate", "--seed", "--steps", "model", "out"),
    ],
    "compress": [
        *("--data", "--dry-run", "--force", "--json", "--rate", "--ratio", "--retention"),
        *("--seed", "--steps", "model", "out"),
    ],
    "bake": [
        *(
            "--direction",
            "--dry-run",
            "--force",
            "--json",
            "--lora-rank",
            "--prompt",
            "--questions",
        ),
        *("--rate", "--seed", "--steps", "--strength", "model", "out"),
    ],
    "edge": [
        *("--dry-run", "--json", "--preset", "--seed", "--set", "--steps", "--storage"),
        *("--target", "model", "out"),
    ],
    "push": ["--dry-run", "--json", "--private", "--revision", "repo", "source"],
    "sync": ["--json", "--online", "--storage", "--to", "session"],
    "evo": [
        *("--base", "--base-models", "--config", "--data", "--device", "--dry-run", "--gens"),
        *("--heal", "--heal-data", "--json", "--output-dir", "--replicates", "--resume"),
        *("--seed", "--set"),
        "--time-budget",
    ],
    "evo replay": ["--json", "lineage", "target"],
    "merge": [
        *("--base", "--combo", "--dry-run", "--force", "--json", "--max-ram", "--method"),
        *("--models", "--seed", "--set", "--threads", "paths"),
    ],
    "generate": [
        *("--json", "--max-tokens", "--seed", "--temperature", "--top-k", "--top-p"),
        *("model", "prompt"),
    ],
    "chat": [
        *("--files", "--hide-thoughts", "--max-tokens", "--no-tools", "--seed", "--system"),
        *("--temperature", "--think", "--tools", "--top-k", "--top-p", "model"),
    ],
    "eval": [
        *("--data", "--data-dir", "--items", "--json", "--level", "--pack", "--shots", "--split"),
        *("--tasks", "model"),
    ],
    "compare": [
        *("--data", "--data-dir", "--items", "--json", "--level", "--pack", "--seed", "--shots"),
        *("--split", "--tasks", "candidate", "reference"),
    ],
    "init": ["--dry-run", "--force", "--preset", "--set", "folder"],
    "validate": ["--json", "--preset", "--set", "path"],
    "ls": ["--json", "--storage"],
    "show": ["--json", "--storage", "--verify", "name"],
    "models": ["--json", "--phase", "--session", "--storage", "--tag", "--text"],
    "clean": [
        *("--age", "--all", "--config", "--cron", "--dry-run", "--failed", "--json"),
        *("--storage", "--yes"),
    ],
    "vacuum": ["--json", "--storage"],
    "doctor": ["--json", "--repair", "--storage"],
    "dashboard": ["--no-browser", "--port", "--storage"],
    "serve": [
        *("--host", "--mcp", "--memory", "--model", "--port", "--queue", "--storage", "--token"),
        "--tools",
    ],
    "data": [],
    "data ls": ["--data-dir", "--json"],
    "data fetch": ["--data-dir", "--json", "--limit", "names"],
    "data verify": ["--data-dir", "--json", "names"],
    "data show": ["--data-dir", "--json", "--split", "-n", "name"],
    "data traces": [
        *("--cost-cap", "--count", "--dry-run", "--endpoint", "--family", "--generate", "--json"),
        *("--model", "--out", "--seed", "--set", "--strategy"),
    ],
}
