//! What the documents say is there, is there.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on shall stop")]

use std::fs;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every `file::function` in backticks in docs/SEMANTICS.md is a test in tests/, or in src/.
#[test]
fn the_tests_that_the_promises_name_exist() {
    let text = read("docs/SEMANTICS.md");
    let mut named = 0;
    for word in text.split('`').skip(1).step_by(2) {
        let Some((file, function)) = word.rsplit_once("::") else { continue };
        // Of more than one part: a module of the library.
        let folder = if file.contains("::") { "src" } else { "tests" };
        let path = format!("{folder}/{}.rs", file.replace("::", "/"));
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

/// Links between documents lead somewhere.
#[test]
fn links_lead_to_files() {
    for document in [
        "README.md",
        "docs/ARCHITECTURE.md",
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
