//! Names as people may see them, in log lines and events: in one line, and without power over a terminal.

/// What does not show, or shows what follows as something else.
fn hidden(char: char) -> bool {
    // Line separators, and marks that change the direction of writing.
    char.is_control()
        || matches!(char, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{061c}')
        || matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A name, with escapes as Rust and most shells know them for what must not be shown. Different names look different.
pub fn name(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            if char == '\\' || hidden(char) {
                out.extend(char.escape_default());
            } else {
                out.push(char);
            }
        }
        for byte in chunk.invalid() {
            out.push_str(&format!("\\x{byte:02x}"));
        }
    }
    out
}

/// A line that has been put together, made one line again where somebody has forgotten to escape a name.
pub fn line(text: &str) -> String {
    text.chars().map(|char| if hidden(char) { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_line_and_are_told_apart() {
        for (bytes, shown) in [
            (&b"3fa9.kv"[..], "3fa9.kv"),
            ("Schl\u{fc}ssel \u{2211}".as_bytes(), "Schl\u{fc}ssel \u{2211}"),
            (b"a\nb\rc\td", "a\\nb\\rc\\td"),
            (b"\x1b[2J", "\\u{1b}[2J"),
            (b"\x7f", "\\u{7f}"),
            ("\u{9b}2J".as_bytes(), "\\u{9b}2J"),
            ("gpj.\u{202e}exe".as_bytes(), "gpj.\\u{202e}exe"),
            (b"a\xff\xfe", "a\\xff\\xfe"),
            (b"a\\xff", "a\\\\xff"),
        ] {
            assert_eq!(name(bytes), shown);
        }
        assert_eq!(line("a\n\u{1b}b c"), "a  b c");
    }
}
