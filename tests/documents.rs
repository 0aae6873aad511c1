//! What the documents say is there, is there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every `file::function` in backticks in docs/SEMANTICS.md and docs/RELIABILITY.md is a test in tests/, or in src/.
#[test]
fn the_tests_that_the_promises_name_exist() {
    let text = read("docs/SEMANTICS.md") + &read("docs/RELIABILITY.md");
    let mut named = 0;
    for word in text.split('`').skip(1).step_by(2) {
        let Some((file, function)) = word.rsplit_once("::") else { continue };
        // What is not in tests/ is a module of the library.
        let within = |folder: &str| format!("{folder}/{}.rs", file.replace("::", "/"));
        let path = [within("tests"), within("src")]
            .into_iter()
            .find(|path| Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists())
            .unwrap_or_else(|| panic!("{word}: there is no such file"));
        assert!(read(&path).contains(&format!("fn {function}(")), "{path} has no test {function}");
        named += 1;
    }
    assert!(named > 20, "only {named} tests are named");
}

/// Every promise has a test, or says that it is a matter of construction.
#[test]
fn every_promise_names_its_test() {
    let text = read("docs/SEMANTICS.md");
    let mut promises = 0;
    for paragraph in text.split("\n\n") {
        if paragraph.starts_with("**S") {
            promises += 1;
            assert!(paragraph.contains("::"), "no test is named in: {paragraph}");
        }
    }
    assert!(promises > 15, "only {promises} promises");
}

/// The rules named in a text: an R and its number, standing alone.
fn rules(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_rule = |word: &&str| {
        let number = word.strip_prefix('R').map(|rest| rest.trim_end_matches('b'));
        number.is_some_and(|number| {
            (1..=2).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit())
        })
    };
    words.filter(is_rule).map(str::to_owned).collect()
}

fn texts_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            texts_below(&entry, found);
        } else if entry
            .extension()
            .is_some_and(|kind| ["rs", "md", "sh", "h"].iter().any(|known| kind == *known))
        {
            found.push(entry);
        }
    }
}

/// Whoever reads of "rule R7" in the code finds out what it says.
#[test]
fn every_rule_that_is_cited_is_defined() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = read("docs/RULES.md");
    let definitions: Vec<_> =
        page.lines().filter_map(|line| line.strip_prefix("* **R")?.split_once(".**")).collect();
    let defined: BTreeSet<_> = definitions.iter().map(|(number, _)| format!("R{number}")).collect();
    assert_eq!(defined.len(), definitions.len(), "a rule is defined twice");
    let mut texts = Vec::new();
    for dir in ["src", "tests", "docs", "mount-tools/src", "mount-tools/include", "examples", "benches"] {
        texts_below(&root.join(dir), &mut texts);
    }
    let mut cited = BTreeSet::new();
    for path in &texts {
        let named = rules(&fs::read_to_string(path).unwrap());
        let unknown: Vec<_> = named.difference(&defined).collect();
        assert!(
            unknown.is_empty(),
            "{} cites {unknown:?}, which docs/RULES.md does not define",
            path.display()
        );
        if !path.ends_with("docs/RULES.md") {
            cited.extend(named);
        }
    }
    assert!(cited.len() > 10, "only {cited:?} are cited");
}

/// Links between documents lead somewhere.
#[test]
fn links_lead_to_files() {
    for document in [
        "README.md",
        "docs/ARCHITECTURE.md",
        "docs/RULES.md",
        "docs/RELIABILITY.md",
        "docs/SEMANTICS.md",
        "docs/CONTROL.md",
        "docs/CLIENTS.md",
        "docs/OPERATIONS.md",
        "docs/SECURITY.md",
        "docs/ON-DISK.md",
        "docs/PERFORMANCE.md",
    ] {
        let text = read(document);
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(document);
        for link in text.split("](").skip(1) {
            let target = link.split(')').next().unwrap();
            if target.starts_with("http") {
                continue;
            }
            let target = dir.parent().unwrap().join(target.split('#').next().unwrap());
            assert!(target.exists(), "{document} links to {}", target.display());
        }
    }
}
