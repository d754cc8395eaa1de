"""Our files in other projects' hands, each in an environment of its own."""
