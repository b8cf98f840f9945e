"""What maintainers and instructors run: notebooks, publishing, the course runner, the set-up."""
