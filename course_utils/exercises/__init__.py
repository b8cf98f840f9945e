"""The course's exercises: `engine` says what an exercise is, and `lessonNN` holds those of one lesson."""
