"""A DeepAgents agent with a shell and files in a jail without network.

pip install 'holdfast[deepagents]' && ANTHROPIC_API_KEY=... python deepagents_agent.py
"""

from deepagents import create_deep_agent
from langchain.chat_models import init_chat_model

import holdfast.sync
from holdfast.integrations.deepagents import Backend

with holdfast.sync.create("bwrap") as box:
    model = init_chat_model("anthropic:claude-sonnet-4-5")
    agent = create_deep_agent(model=model, backend=Backend(box))
    state = agent.invoke({"messages": [("user", "Which operating system is this? Use the shell.")]})
    print(state["messages"][-1].content)
