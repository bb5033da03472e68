"""Starting the local server and finding its keeper. Standard library only: stateless verbs import it."""
