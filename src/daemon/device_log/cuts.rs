//! What a crash leaves: from a log to the images that there may be at each point of it.
//!
//! A write is on the device for sure once it had been answered when a flush began that has ended. Until then it is
//! there, or not, or in part, in whatever order, sector by sector.

use super::machine::{Entry, Image, Write};
use super::model::Model;
use super::rng::Rng;

/// Random subsets of each cut, when all are tried.
const SUBSETS: usize = 4;
/// Entries of the log that a failure shows.
const SHOWN: usize = 60;

/// The superblocks end here.
const SUPERBLOCKS_END: u64 = 64 << 10;

/// The journal's headers and checkpoints end here on the first device of a store for the fewest files: 64 KiB, two pages
/// and two areas of 1 MiB.
const CHECKPOINTS_END: u64 = SUPERBLOCKS_END + (8 << 10) + (2 << 20);

/// What kind of image it is. Each kind gets its share of those that are tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// All writes so far are there.
    Prefix,
    /// A checkpoint is not sure, which is the case at few cuts.
    Checkpoint,
    /// An opening is being counted, which it is at even fewer.
    Opening,
    /// A restarted daemon has read what the one before it wrote, and that is not sure.
    Restart,
    Torn,
}

/// Which of the writes that are not sure are there.
#[derive(Clone, Debug)]
pub enum Variant {
    Prefix,
    Nothing,
    Missing(usize),
    Torn(usize, u64),
    Subset(u64),
}

/// A point of the log.
pub struct Cut {
    pub at: usize,
    sure: Vec<Image>,
    unsure: Vec<Write>,
    /// Writes before this one are of a daemon that was killed.
    killed: u64,
    pub model: Model,
}

impl Cut {
    pub fn variants(&self, rng: &mut Rng) -> Vec<Variant> {
        let count = self.unsure.len();
        let mut all = vec![Variant::Prefix];
        if count > 0 {
            all.push(Variant::Nothing);
            all.extend((0..count).map(|which| Variant::Torn(which, rng.next())));
            all.extend((0..SUBSETS).map(|_| Variant::Subset(rng.next())));
        }
        if count > 1 {
            all.extend((0..count).map(Variant::Missing));
        }
        all
    }

    pub fn kind(&self, variant: &Variant) -> Kind {
        let is_superblock = |write: &Write| write.offset < SUPERBLOCKS_END;
        let is_checkpoint = |write: &Write| write.device == 0 && write.offset < CHECKPOINTS_END;
        match variant {
            Variant::Prefix => Kind::Prefix,
            _ if self.unsure.iter().any(is_superblock) => Kind::Opening,
            _ if self.unsure.iter().any(|write| write.id < self.killed) => Kind::Restart,
            _ if self.unsure.iter().any(is_checkpoint) => Kind::Checkpoint,
            _ => Kind::Torn,
        }
    }

    /// The devices after the crash.
    pub fn images(&self, variant: &Variant) -> Vec<Image> {
        let mut images = self.sure.clone();
        match variant {
            Variant::Nothing => {}
            Variant::Prefix => self.unsure.iter().for_each(|write| images[write.device].write(write)),
            Variant::Missing(missing) => {
                for (_, write) in self.unsure.iter().enumerate().filter(|(at, _)| at != missing) {
                    images[write.device].write(write);
                }
            }
            Variant::Torn(torn, seed) => {
                let mut rng = Rng::new(*seed);
                for (at, write) in self.unsure.iter().enumerate() {
                    let image = &mut images[write.device];
                    if at == *torn { tear(image, write, &mut rng) } else { image.write(write) }
                }
            }
            Variant::Subset(seed) => {
                let mut rng = Rng::new(*seed);
                let mut order: Vec<&Write> = self.unsure.iter().collect();
                rng.shuffle(&mut order);
                for write in order {
                    let image = &mut images[write.device];
                    match rng.below(3) {
                        0 => {}
                        1 => image.write(write),
                        _ => tear(image, write, &mut rng),
                    }
                }
            }
        }
        images
    }

    /// The crash, and what came before it.
    pub fn describe(&self, variant: &Variant, log: &[Entry]) -> String {
        let unsure: Vec<String> = self.unsure.iter().map(Write::to_string).collect();
        let before: Vec<String> = log[..=self.at].iter().rev().take(SHOWN).map(Entry::to_string).collect();
        let before: Vec<String> = before.into_iter().rev().collect();
        format!(
            "entry {} of {}, {variant:?} of the writes {unsure:?}, after {}",
            self.at,
            log.len(),
            before.join("; ")
        )
    }
}

/// Some sectors of a write: a part from its start, from its end, one missing, or any.
fn tear(image: &mut Image, write: &Write, rng: &mut Rng) {
    let sector = [512, 4096][rng.below(2)];
    let count = write.sectors(sector);
    let (kind, at) = (rng.below(4), rng.below(count));
    image.tear(write, sector, &mut |index| match kind {
        0 => index < at,
        1 => index > at,
        2 => index != at,
        _ => rng.percent(50),
    });
}

/// Goes through a log, and shows `visit` each point at which something has changed for whoever comes after a crash.
pub fn each_cut(images: Vec<Image>, model: Model, log: &[Entry], visit: &mut dyn FnMut(&Cut)) {
    let mut cut = Cut { at: 0, sure: images, unsure: Vec::new(), killed: 0, model };
    let mut answered: Vec<u64> = Vec::new();
    let mut flushes: Vec<(u64, usize, Vec<u64>)> = Vec::new();
    for (at, entry) in log.iter().enumerate() {
        cut.at = at;
        match entry {
            Entry::Write(write) => cut.unsure.push(write.clone()),
            Entry::Done(id) => {
                answered.push(*id);
                continue;
            }
            Entry::Changed(write) => {
                if let Some(old) = cut.unsure.iter_mut().find(|old| old.id == write.id) {
                    old.pages.clone_from(&write.pages);
                }
            }
            Entry::FlushBegins { id, device } => {
                flushes.push((*id, *device, answered.clone()));
                continue;
            }
            Entry::FlushEnds { id } => {
                let Some(at) = flushes.iter().position(|(flush, ..)| flush == id) else { continue };
                let (_, device, covers) = flushes.swap_remove(at);
                let (sure, unsure) = std::mem::take(&mut cut.unsure)
                    .into_iter()
                    .partition(|write| write.device == device && covers.contains(&write.id));
                cut.unsure = unsure;
                sure.iter().for_each(|write| cut.sure[write.device].write(write));
                answered.retain(|id| cut.unsure.iter().any(|write| write.id == *id));
            }
            Entry::Killed { lost } => {
                flushes.clear();
                cut.killed = cut.unsure.iter().map(|write| write.id + 1).max().unwrap_or(cut.killed);
                cut.unsure.retain(|write| !lost.contains(&write.id));
                continue;
            }
            Entry::Mark(mark) => {
                cut.model.apply(mark);
                if !matches!(mark, super::model::Mark::Settled(_)) {
                    continue;
                }
            }
        }
        visit(&cut);
    }
}
