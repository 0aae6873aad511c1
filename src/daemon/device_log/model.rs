//! What may be found after a crash: under each name, what was durable last or something that came after it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::store::hot::{BLOCK, block_len, blocks_for};

pub type Attributes = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Clone, PartialEq, Eq)]
pub enum Thing {
    Dir,
    Link(Vec<u8>),
    File(Arc<Vec<u8>>),
}

impl std::fmt::Debug for Thing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Dir => f.write_str("directory"),
            Self::Link(target) => write!(f, "link to {target:?}"),
            Self::File(bytes) => {
                let head: Vec<String> = bytes.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
                write!(f, "{} bytes {}..", bytes.len(), head.concat())
            }
        }
    }
}

/// What is under a name at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub thing: Thing,
    pub attributes: Attributes,
}

/// What a client made of a name.
#[derive(Clone, Debug)]
pub struct Version {
    pub found: Found,
    /// Versions of one file that was changed where it was have this in common.
    pub file: u64,
    /// It came into being by a change in place: each block is stored by itself.
    pub in_place: bool,
    /// Its file is written in place from now on.
    pub slot: bool,
}

impl Version {
    pub fn bytes(&self) -> &[u8] {
        match &self.found.thing {
            Thing::File(bytes) => bytes,
            _ => &[],
        }
    }
}

pub type Maybe = Option<Arc<Version>>;

/// What a client did and was told.
#[derive(Clone)]
pub enum Mark {
    /// From here on the name may lead to this.
    May { path: String, version: Maybe },
    /// A name was taken by another: from here on `from` may be gone and `to` be what it was, both or neither.
    Moved { from: String, to: String },
    /// These versions of these names, by number, are durable.
    Settled(Vec<(String, usize)>),
    /// A reader has it open: it is not evicted.
    Held { path: String, held: bool },
}

#[derive(Clone, Default)]
pub struct Name {
    /// The number of the first of `versions`: what was durable last.
    first: usize,
    versions: Vec<Maybe>,
    held: bool,
}

impl Name {
    fn possible(&self) -> &[Maybe] {
        if self.versions.is_empty() { &[None] } else { &self.versions }
    }

    fn last_number(&self) -> usize {
        self.first + self.versions.len() - 1
    }

    fn settled(&self) -> bool {
        self.versions.len() <= 1
    }
}

#[derive(Clone)]
struct Move {
    from: String,
    to: String,
    /// Until one of the names is changed again.
    numbers: (usize, usize),
    before: (Maybe, Maybe),
}

#[derive(Clone, Default)]
pub struct Model {
    names: BTreeMap<String, Name>,
    moves: Vec<Move>,
    /// Files that nobody has open may go at any time.
    pub evicting: bool,
}

impl Model {
    pub fn new(evicting: bool) -> Self {
        Self { evicting, ..Self::default() }
    }

    pub fn apply(&mut self, mark: &Mark) {
        match mark {
            Mark::May { path, version } => {
                let name = self.names.entry(path.clone()).or_default();
                if name.versions.is_empty() {
                    name.versions.push(None);
                }
                name.versions.push(version.clone());
            }
            Mark::Moved { from, to } => self.moved(from, to),
            Mark::Settled(list) => {
                for (path, number) in list {
                    let Some(name) = self.names.get_mut(path) else { continue };
                    if *number > name.first {
                        name.versions.drain(..*number - name.first);
                        name.first = *number;
                    }
                }
            }
            Mark::Held { path, held } => self.names.entry(path.clone()).or_default().held = *held,
        }
    }

    /// The two last versions of the names are those of the move.
    fn moved(&mut self, from: &str, to: &str) {
        let before = |name: &Name| match &name.versions[..] {
            [before, _] => Some(before.clone()),
            _ => None,
        };
        let (Some(a), Some(b)) = (self.names.get(from), self.names.get(to)) else { return };
        if let (Some(one), Some(other)) = (before(a), before(b)) {
            let numbers = (a.last_number(), b.last_number());
            self.moves.push(Move { from: from.to_owned(), to: to.to_owned(), numbers, before: (one, other) });
        }
        let names = &self.names;
        self.moves.retain(|old| {
            names[&old.from].last_number() == old.numbers.0 && names[&old.to].last_number() == old.numbers.1
        });
    }

    /// What the name leads to if there is no crash.
    pub fn latest(&self, path: &str) -> Maybe {
        self.names.get(path).and_then(|name| name.versions.last().cloned()).flatten()
    }

    /// Everything that may be found under the name after a crash, the latest last.
    pub fn possible(&self, path: &str) -> Vec<Maybe> {
        self.names.get(path).map_or_else(Vec::new, |name| name.possible().to_vec())
    }

    pub fn below(&self, dir: &str) -> Vec<String> {
        let prefix = format!("{dir}/");
        self.names.keys().filter(|path| path.starts_with(&prefix)).cloned().collect()
    }

    pub fn settle(&self, path: &str) -> Vec<(String, usize)> {
        let name = self.names.get(path).filter(|name| !name.versions.is_empty());
        name.map(|name| (path.to_owned(), name.last_number())).into_iter().collect()
    }

    pub fn settle_below(&self, dir: &str) -> Vec<(String, usize)> {
        let own = self.settle(dir);
        own.into_iter().chain(self.below(dir).iter().flat_map(|path| self.settle(path))).collect()
    }

    /// What was found is what there is, from now on.
    pub fn adopt(&mut self, found: &BTreeMap<String, Found>, fresh: &mut dyn FnMut() -> u64) -> Vec<Mark> {
        let (mut marks, mut settled) = (Vec::new(), Vec::new());
        for (path, name) in &self.names {
            let version = found.get(path).map(|found| {
                let slot = name.versions.iter().flatten().any(|version| version.slot);
                Arc::new(Version { found: found.clone(), file: fresh(), in_place: false, slot })
            });
            marks.push(Mark::May { path: path.clone(), version });
            marks.push(Mark::Held { path: path.clone(), held: false });
            settled.push((path.clone(), name.first + name.versions.len().max(1)));
        }
        marks.push(Mark::Settled(settled));
        marks.iter().for_each(|mark| self.apply(mark));
        marks
    }

    pub fn check(&self, found: &BTreeMap<String, Found>) -> Result<(), String> {
        for (path, thing) in found {
            let name = self.names.get(path).ok_or_else(|| format!("{path}: nobody made it: {thing:?}"))?;
            Self::check_name(name, thing).map_err(|why| format!("{path}: {why}\n{}", Self::history(name)))?;
        }
        for (path, name) in self.names.iter().filter(|(path, _)| !found.contains_key(*path)) {
            let may_go = self.evicting && !name.held;
            if !may_go && name.possible().iter().all(Option::is_some) {
                return Err(format!("{path}: it is not there\n{}", Self::history(name)));
            }
        }
        self.check_moves(found)?;
        self.check_order(found)
    }

    fn history(name: &Name) -> String {
        let mut out = String::new();
        for (at, version) in name.versions.iter().enumerate() {
            let what = version.as_ref().map(|version| {
                let attributes: Vec<_> =
                    version.found.attributes.values().map(|value| &value[..value.len().min(4)]).collect();
                (&version.found.thing, version.file, version.in_place, version.slot, attributes)
            });
            out += &format!("  {}: {what:?}\n", name.first + at);
        }
        out
    }

    fn check_name(name: &Name, found: &Found) -> Result<(), String> {
        let versions: Vec<&Arc<Version>> = name.possible().iter().flatten().collect();
        if versions.iter().any(|version| version.found == *found) {
            return Ok(());
        }
        let files: BTreeSet<u64> =
            versions.iter().filter(|version| version.in_place).map(|version| version.file).collect();
        for file in files {
            let own: Vec<&Version> =
                versions.iter().filter(|version| version.file == file).map(|version| &***version).collect();
            if own.iter().any(|version| version.found.attributes == found.attributes)
                && Self::is_made_of(&own, found)
            {
                return Ok(());
            }
        }
        let Thing::File(bytes) = &found.thing else { return Err(format!("is {found:?}")) };
        let blocks: Vec<String> = bytes
            .chunks(BLOCK as usize)
            .enumerate()
            .map(|(at, block)| {
                let same = versions.iter().position(|version| {
                    version.bytes().chunks(BLOCK as usize).nth(at).is_some_and(|other| other == block)
                });
                same.map_or_else(|| "?".into(), |same| (name.first + same).to_string())
            })
            .collect();
        let attributes: Vec<_> =
            found.attributes.values().map(|value| &value[..value.len().min(4)]).collect();
        let differs: Vec<String> = versions
            .iter()
            .map(|version| {
                let pairs = bytes.iter().zip(version.bytes()).enumerate();
                let mut wrong = pairs.filter(|(_, (one, other))| one != other);
                let first = wrong.next().map(|(at, _)| at);
                let last = wrong.next_back().map(|(at, _)| at);
                format!("{first:?} to {last:?}")
            })
            .collect();
        Err(format!(
            "differs {differs:?}: {:?} {attributes:?} is no version of it; its blocks are of {blocks:?}",
            found.thing
        ))
    }

    /// A file that is written in place: each block is one of its versions' own, or not there yet. It ends where one of
    /// them did and as that one did, or where the last block that is left of one did.
    fn is_made_of(versions: &[&Version], found: &Found) -> bool {
        let Thing::File(bytes) = &found.thing else { return false };
        let size = bytes.len() as u64;
        let blocks = blocks_for(size);
        let ends = versions.iter().any(|version| {
            let len = version.bytes().len() as u64;
            len == size
                || (size < len
                    && size.is_multiple_of(BLOCK)
                    && versions.iter().any(|other| blocks_for(other.bytes().len() as u64) == blocks))
        });
        ends && (0..blocks).all(|index| {
            let start = index * BLOCK as usize;
            let block = &bytes[start..start + block_len(size, index)];
            versions.iter().any(|version| {
                let from = version.bytes().get(start..).unwrap_or_default();
                let from = &from[..from.len().min(BLOCK as usize)];
                let longer = block.len().saturating_sub(from.len());
                (longer == 0 || index + 1 < blocks)
                    && from.len() <= block.len()
                    && block[..from.len()] == *from
                    && block[from.len()..].iter().all(|&byte| byte == 0)
            })
        })
    }

    /// A durable file that got another name has one of the two.
    fn check_moves(&self, found: &BTreeMap<String, Found>) -> Result<(), String> {
        if self.evicting {
            return Ok(());
        }
        for step in &self.moves {
            let (Some(a), Some(b)) = (self.names.get(&step.from), self.names.get(&step.to)) else { continue };
            if (a.last_number(), b.last_number()) != step.numbers || a.settled() || b.settled() {
                continue;
            }
            let is = |path: &str, version: &Maybe| {
                found.get(path) == version.as_ref().map(|version| &version.found)
            };
            let whole = (is(&step.from, &step.before.0) && is(&step.to, &step.before.1))
                || (is(&step.from, &None) && is(&step.to, &step.before.0));
            if !whole {
                let (one, other) = (found.get(&step.from), found.get(&step.to));
                return Err(format!("{} became {}, but one half: {one:?}, {other:?}", step.from, step.to));
            }
        }
        Ok(())
    }

    /// Files are stored in the order of publishing: of a series that one client published, the first are there.
    fn check_order(&self, found: &BTreeMap<String, Found>) -> Result<(), String> {
        let mut missing: Option<&String> = None;
        for (path, name) in self.names.iter().filter(|(path, _)| path.contains("/series/")) {
            let dir = |path: &str| path.rsplit_once('/').map(|(dir, _)| dir.to_owned());
            if missing.is_some_and(|other| dir(other) != dir(path)) {
                missing = None;
            }
            if found.contains_key(path) {
                if let Some(missing) = missing {
                    return Err(format!("{path} is there, and {missing}, published before it, is not"));
                }
            } else if name.versions.last().is_some_and(Option::is_some) {
                missing = missing.or(Some(path));
            }
        }
        Ok(())
    }
}
