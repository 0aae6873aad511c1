//! redb: a copy-on-write B-tree in one file.

use std::path::Path;

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use crate::{Catalog, Result};

const RECORDS: TableDefinition<u64, &[u8]> = TableDefinition::new("records");
/// The default is 1 GiB, which a catalog that the daemon keeps in its own form would not use twice.
const CACHE_BYTES: usize = 64 << 20;

pub struct Redb(Database);

impl Catalog for Redb {
    fn create(dir: &Path, _: u64) -> Result<Self> {
        Ok(Self(Database::builder().set_cache_size(CACHE_BYTES).create(dir.join("catalog.redb"))?))
    }

    fn open(dir: &Path, _: u64, visit: &mut dyn FnMut(&[u8])) -> Result<Self> {
        let database = Database::builder().set_cache_size(CACHE_BYTES).open(dir.join("catalog.redb"))?;
        for entry in database.begin_read()?.open_table(RECORDS)?.iter()? {
            visit(entry?.1.value());
        }
        Ok(Self(database))
    }

    fn commit(&mut self, records: &[(u64, Vec<u8>)]) -> Result<()> {
        // Durable by default when the transaction has been committed.
        let transaction = self.0.begin_write()?;
        {
            let mut table = transaction.open_table(RECORDS)?;
            for (id, bytes) in records {
                table.insert(id, bytes.as_slice())?;
            }
        }
        transaction.commit()?;
        Ok(())
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}
