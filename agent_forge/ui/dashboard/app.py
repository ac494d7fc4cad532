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

PAGES = {
    "overview": ("Overview", ":material/dashboard:", overview.render),
    "phases": ("Phase details", ":material/insights:", phases.render),
    "evolution": ("Evolution", ":material/account_tree:", evolution.render),
    "models": ("Models", ":material/deployed_code:", models.render),
    "playground": ("Playground", ":material/chat:", playground.render),
    "comparison": ("Compare runs", ":material/compare_arrows:", comparison.render),
    "configuration": ("Configuration", ":material/tune:", configuration.render),
    "system": ("System", ":material/memory:", system.render),
}

st.set_page_config(page_title="Agent Forge", layout="wide", initial_sidebar_state="expanded")
page = st.navigation(
    [
        st.Page(render, title=title, icon=icon, url_path=path, default=path == "overview")
        for path, (title, icon, render) in PAGES.items()
    ]
)
state.sidebar()
st.title(page.title)
page.run()
