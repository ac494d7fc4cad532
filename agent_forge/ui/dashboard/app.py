"""The script that streamlit runs for every look at a page: navigation, sidebar, page."""

import streamlit as st

from agent_forge.ui.dashboard import (
    comparison,
    configuration,
    evolution,
    models,
    overview,
    phases,
    playground,
    state,
    system,
)

# Without icons: browsers would fetch those of Material for the tab from another server.
PAGES = {
    "overview": ("Overview", overview.render),
    "phases": ("Phase details", phases.render),
    "evolution": ("Evolution", evolution.render),
    "models": ("Models", models.render),
    "playground": ("Playground", playground.render),
    "comparison": ("Compare runs", comparison.render),
    "configuration": ("Configuration", configuration.render),
    "system": ("System", system.render),
}

STYLE = """
.stMainBlockContainer { padding: 2.5rem 2rem 2rem; }
[class*="st-key-card-"] { gap: 0.4rem; }
[class*="st-key-card-"] [data-testid="stText"], .stSidebar [data-testid="stText"] {
  font-size: 0.85rem; overflow-wrap: anywhere;
}
"""

st.set_page_config(page_title="Agent Forge", layout="wide", initial_sidebar_state="expanded")
page = st.navigation(
    [
        st.Page(render, title=title, url_path=path, default=path == "overview")
        for path, (title, render) in PAGES.items()
    ]
)
st.html(f"<style>{STYLE}</style>")
state.sidebar()
st.title(page.title)
page.run()
