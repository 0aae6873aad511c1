//! Words that a shell writes to a control file: `echo PATH... > .ctl/prefetch`.
//!
//! They are separated by white space, and written as in a shell: quotes and backslashes keep what is in them, `$'...'` too,
//! since `printf '%q\n'` of bash writes that. What has a zero byte in it is a list as `find -print0` makes it.

use nix::errno::Errno;

use crate::abi::{COMPONENT_MAX, NAME_BYTES_MAX};

type Word = Vec<u8>;

/// The words of one write.
///
/// # Errors
/// EINVAL: a quote is not closed, or nothing follows a backslash.
pub fn words(text: &[u8]) -> Result<Vec<Word>, Errno> {
    if text.contains(&0) {
        return Ok(text
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(<[u8]>::to_vec)
            .collect());
    }
    let (mut all, mut word): (Vec<Word>, Option<Word>) = (Vec::new(), None);
    let mut rest = text.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => all.extend(word.take()),
            b'\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match rest.next().ok_or(Errno::EINVAL)? {
                        b'\'' => break,
                        byte => word.push(byte),
                    }
                }
            }
            b'"' => {
                let word = word.get_or_insert_default();
                loop {
                    match rest.next().ok_or(Errno::EINVAL)? {
                        b'"' => break,
                        b'\\' => match rest.next().ok_or(Errno::EINVAL)? {
                            byte @ (b'"' | b'\\' | b'$' | b'`') => word.push(byte),
                            byte => word.extend([b'\\', byte]),
                        },
                        byte => word.push(byte),
                    }
                }
            }
            b'$' if rest.peek() == Some(&b'\'') => {
                rest.next();
                let word = word.get_or_insert_default();
                loop {
                    match rest.next().ok_or(Errno::EINVAL)? {
                        b'\'' => break,
                        b'\\' => word.push(escaped(&mut rest)?),
                        byte => word.push(byte),
                    }
                }
            }
            b'\\' => word.get_or_insert_default().push(rest.next().ok_or(Errno::EINVAL)?),
            byte => word.get_or_insert_default().push(byte),
        }
    }
    all.extend(word);
    Ok(all)
}

/// What follows a backslash in `$'...'`.
fn escaped(rest: &mut std::iter::Peekable<impl Iterator<Item = u8>>) -> Result<u8, Errno> {
    let first = rest.next().ok_or(Errno::EINVAL)?;
    let mut digits = |base: u32, most: usize, mut value: Option<u32>| {
        for _ in 0..most {
            let digit = rest.peek().and_then(|byte| char::from(*byte).to_digit(base));
            let Some(digit) = digit else { break };
            value = Some(value.unwrap_or(0) * base + digit);
            rest.next();
        }
        value.map(|value| value as u8).ok_or(Errno::EINVAL)
    };
    match first {
        b'x' => digits(16, 2, None),
        b'0'..=b'7' => digits(8, 2, Some(u32::from(first - b'0'))),
        b'a' => Ok(7),
        b'b' => Ok(8),
        b'e' | b'E' => Ok(27),
        b'f' => Ok(12),
        b'n' => Ok(b'\n'),
        b'r' => Ok(b'\r'),
        b't' => Ok(b'\t'),
        b'v' => Ok(11),
        byte => Ok(byte),
    }
}

/// The path from the root of the mount that a word means: it may begin with the path of the mount itself.
///
/// # Errors
/// EINVAL: it goes up. ENAMETOOLONG: a component of more than 255 bytes, or more than 4096 in all.
pub fn path(word: &[u8], mountpoint: &[u8]) -> Result<Vec<u8>, Errno> {
    let below = word.strip_prefix(mountpoint).filter(|rest| rest.is_empty() || rest.starts_with(b"/"));
    let parts = below.unwrap_or(word).split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(Errno::EINVAL);
    }
    let path = parts.join(&b'/');
    if path.len() > NAME_BYTES_MAX || parts.iter().any(|part| part.len() > COMPONENT_MAX) {
        return Err(Errno::ENAMETOOLONG);
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Result<Vec<String>, Errno> {
        let text_of = |word: Word| String::from_utf8(word).expect("as it was written");
        words(text.as_bytes()).map(|all| all.into_iter().map(text_of).collect())
    }

    #[test]
    fn words_are_what_a_shell_takes_for_words() {
        for (text, wanted) in [
            ("", &[][..]),
            (" \n\t", &[]),
            ("one", &["one"]),
            ("one  two\nthree\n", &["one", "two", "three"]),
            (r"a\ b c", &["a b", "c"]),
            (r#"'a b' "c d" e'f 'g"#, &["a b", "c d", "ef g"]),
            (r#""a\"b\\c\d""#, &[r#"a"b\c\d"#]),
            ("''", &[""]),
            (r"$'a\nb\t\x41\101\'\\' c$", &["a\nb\tAA'\\", "c$"]),
            (r"$'\e\x4'", &["\x1b\x04"]),
        ] {
            assert_eq!(
                split(text).as_deref(),
                Ok(&wanted.iter().map(ToString::to_string).collect::<Vec<_>>()[..]),
                "{text:?}"
            );
        }
        for text in ["'a", "\"a", "a\\", "\"a\\", "$'a", "$'a\\", "$'\\x'"] {
            assert_eq!(split(text), Err(Errno::EINVAL), "{text:?}");
        }
    }

    #[test]
    fn a_zero_byte_makes_it_a_list() {
        assert_eq!(split("a b\0'c\0"), Ok(vec!["a b".to_owned(), "'c".to_owned()]));
        assert_eq!(split("\0"), Ok(vec![]));
    }

    #[test]
    fn paths_go_from_the_root_of_the_mount() {
        let path =
            |word: &str| path(word.as_bytes(), b"/mnt/kv").map(|path| String::from_utf8(path).expect("text"));
        for (word, wanted) in [
            ("a/b", "a/b"),
            ("/a//b/", "a/b"),
            ("./a/./b", "a/b"),
            ("/mnt/kv", ""),
            ("/mnt/kv/", ""),
            ("/mnt/kv/a", "a"),
            ("/mnt/kvx/a", "mnt/kvx/a"),
            ("mnt/kv/a", "mnt/kv/a"),
            ("", ""),
        ] {
            assert_eq!(path(word).as_deref(), Ok(wanted), "{word}");
        }
        assert_eq!(path("a/../b"), Err(Errno::EINVAL));
        assert_eq!(path(&"a".repeat(256)), Err(Errno::ENAMETOOLONG));
        assert_eq!(path(&"a/".repeat(2049)), Err(Errno::ENAMETOOLONG));
        assert!(path(&"a/".repeat(2048)).is_ok());
    }
}
