//! What a person writes to a control file: words, as a shell would take them apart.

use nix::errno::Errno;

/// The words of a write. Those of a list with zero bytes in it are ended by these and taken as they are; all others are
/// separated by white space, which quotes and backslashes keep.
///
/// # Errors
/// EINVAL: a quote without its end, or nothing behind a backslash.
pub fn words(text: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
    if text.contains(&0) {
        return Ok(text
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(<[u8]>::to_vec)
            .collect());
    }
    let mut all = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut rest = text.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte.is_ascii_whitespace() {
            all.extend(word.take());
            continue;
        }
        let word = word.get_or_insert_default();
        match byte {
            b'\'' => until(&mut rest, b'\'', |byte, _| Ok(Some(byte)), word)?,
            b'"' => until(&mut rest, b'"', in_double_quotes, word)?,
            b'$' if rest.next_if_eq(&b'\'').is_some() => until(&mut rest, b'\'', in_ansi_quotes, word)?,
            // A line that goes on.
            b'\\' if rest.next_if_eq(&b'\n').is_some() => {}
            b'\\' => word.push(rest.next().ok_or(Errno::EINVAL)?),
            _ => word.push(byte),
        }
    }
    all.extend(word);
    Ok(all)
}

/// Takes what is between quotes, up to `end`. `take` says what a byte, and what belongs to it, stands for.
fn until<I: Iterator<Item = u8>>(
    rest: &mut std::iter::Peekable<I>,
    end: u8,
    take: impl Fn(u8, &mut std::iter::Peekable<I>) -> Result<Option<u8>, Errno>,
    word: &mut Vec<u8>,
) -> Result<(), Errno> {
    loop {
        let byte = rest.next().ok_or(Errno::EINVAL)?;
        if byte == end {
            return Ok(());
        }
        word.extend(take(byte, rest)?);
    }
}

fn in_double_quotes<I: Iterator<Item = u8>>(
    byte: u8,
    rest: &mut std::iter::Peekable<I>,
) -> Result<Option<u8>, Errno> {
    if byte != b'\\' {
        return Ok(Some(byte));
    }
    let escaped = rest.next_if(|next| matches!(next, b'"' | b'\\' | b'$' | b'`' | b'\n'));
    Ok(if escaped == Some(b'\n') { None } else { Some(escaped.unwrap_or(b'\\')) })
}

/// `$'...'`, as `printf %q` writes what does not show.
fn in_ansi_quotes<I: Iterator<Item = u8>>(
    byte: u8,
    rest: &mut std::iter::Peekable<I>,
) -> Result<Option<u8>, Errno> {
    if byte != b'\\' {
        return Ok(Some(byte));
    }
    Ok(Some(match rest.next().ok_or(Errno::EINVAL)? {
        b'a' => 7,
        b'b' => 8,
        b'e' | b'E' => 27,
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'v' => 11,
        b'x' => digits(rest, 0, 16, 2),
        octal @ b'0'..=b'7' => digits(rest, u32::from(octal - b'0'), 8, 2),
        other => other,
    }))
}

fn digits<I: Iterator<Item = u8>>(
    rest: &mut std::iter::Peekable<I>,
    first: u32,
    radix: u32,
    most: usize,
) -> u8 {
    let mut value = first;
    for _ in 0..most {
        let Some(digit) = rest.peek().and_then(|next| char::from(*next).to_digit(radix)) else { break };
        value = value * radix + digit;
        rest.next();
    }
    value as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(words: Result<Vec<Vec<u8>>, Errno>) -> Vec<String> {
        words.expect("words").into_iter().map(|word| String::from_utf8(word).expect("UTF-8")).collect()
    }

    #[test]
    fn words_are_those_of_a_shell() {
        for (line, wanted) in [
            ("\n", &[][..]),
            ("one two\tthree\n", &["one", "two", "three"]),
            ("'a b' \"c  d\" e\\ f g'h'\"i\"\n", &["a b", "c  d", "e f", "ghi"]),
            ("'' \"\"", &["", ""]),
            (r#""a\"b\\c\d" 'a\b' \'"#, &["a\"b\\c\\d", "a\\b", "'"]),
            (r"$'a\nb\t\'\x41\101\\' $a", &["a\nb\t'AA\\", "$a"]),
        ] {
            assert_eq!(text(words(line.as_bytes())), wanted, "{line}");
        }
        for line in ["'a", "\"a", "a\\", "$'a\\", "$'a"] {
            assert_eq!(words(line.as_bytes()), Err(Errno::EINVAL), "{line}");
        }
    }

    #[test]
    fn a_list_with_zero_bytes_is_taken_as_it_is() {
        assert_eq!(text(words(b"a b\0'c\0\\d\n\0")), ["a b", "'c", "\\d\n"]);
    }
}
