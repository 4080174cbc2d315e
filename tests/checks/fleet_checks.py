"""What tests of strategies share: fields are set and read by their paths."""


def other_value(field):
    """Return a value that a field can have, other than its default."""
    for value in (*field.choices, not field.default, [field.item(1)], {"a": 1}, "other"):
        if type(value) is type(field.default) and value != field.default:
            return value
    return field.default + 3


def set_at(strategy, path, value):
    """Set a field the way a user does: an attribute, or a section with one key in it."""
    for name in reversed(path[1:]):
        value = {name: value}
    setattr(strategy, path[0], value)


def value_at(strategy, path):
    """Return the value of a field."""
    value = getattr(strategy, path[0])
    for name in path[1:]:
        value = value[name]
    return value
