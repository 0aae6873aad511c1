//! The project's own journal and checkpoints, on a region of a file.
//!
//! In the daemon the state is its tree, from which a checkpoint is encoded; here it is a map of records, which a
//! mount does not need and so does not fill.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use kvcachefs::l2::journal::{Batch, Journal, Medium, region_bytes};

use crate::{Catalog, Result};

/// As a store of 4 TiB has it.
const LOG_BYTES: u64 = 256 << 20;
const STORE: [u8; 16] = [7; 16];

struct Plain(File, u64);

impl Medium for Plain {
    fn len(&self) -> u64 {
        self.1
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buf, offset)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.0.write_all_at(buf, offset)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

pub struct Own {
    journal: Journal,
    state: HashMap<u64, Vec<u8>>,
}

fn region(files: u64) -> u64 {
    region_bytes(files + files / 4, 0, LOG_BYTES)
}

impl Own {
    fn checkpoint(&mut self) -> Result<()> {
        let mut checkpoint = self.journal.begin_checkpoint();
        for record in self.state.values() {
            checkpoint.push(record)?;
        }
        Ok(self.journal.finish_checkpoint(checkpoint)?)
    }
}

impl Catalog for Own {
    fn create(dir: &Path, files: u64) -> Result<Self> {
        let file = File::create_new(dir.join("catalog.region"))?;
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, region(files))?;
        file.sync_all()?;
        let medium = Arc::new(Plain(
            File::options().read(true).write(true).open(dir.join("catalog.region"))?,
            region(files),
        ));
        let journal = Journal::format(medium, 0..region(files), LOG_BYTES, &STORE)?;
        Ok(Self { journal, state: HashMap::new() })
    }

    fn open(dir: &Path, files: u64, visit: &mut dyn FnMut(&[u8])) -> Result<Self> {
        let file = File::options().read(true).write(true).open(dir.join("catalog.region"))?;
        let medium = Arc::new(Plain(file, region(files)));
        let (journal, _) = Journal::open(medium, 0..region(files), LOG_BYTES, &STORE, &mut |record| {
            visit(record);
            Ok(())
        })?;
        Ok(Self { journal, state: HashMap::new() })
    }

    fn commit(&mut self, records: &[(u64, Vec<u8>)]) -> Result<()> {
        let mut batch = Batch::default();
        for (id, bytes) in records {
            batch.push(bytes);
            self.state.insert(*id, bytes.clone());
        }
        if self.journal.needs_checkpoint(&batch) {
            self.checkpoint()?;
        }
        Ok(self.journal.append(&batch)?)
    }

    fn close(mut self) -> Result<()> {
        // The daemon ends with one too.
        self.checkpoint()
    }
}
