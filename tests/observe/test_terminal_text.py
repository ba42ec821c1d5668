"""What a model wrote cannot steer the terminal."""

from megatron_rl.observe.terminal_text import printable


def test_control_characters_become_blanks_and_letters_stay() -> None:
    assert printable("a\x1b[31mé\r\x9b1m\x07\u2028\u202e√") == "a [31mé  1m   √"
