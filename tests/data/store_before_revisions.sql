-- Made by the last version whose database had no revisions.
BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	run_id VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	folder VARCHAR NOT NULL, 
	size_bytes INTEGER NOT NULL, 
	created DOUBLE NOT NULL, 
	expires DOUBLE, 
	public BOOLEAN NOT NULL, 
	user_metadata JSON, 
	UNIQUE (run_id, kind, name), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "checkpoints" VALUES(1,'s1:train:0','weights','one','local','s1%3Atrain%3A0/weights/one',123,1004.0,NULL,1,'{"step": "1"}');
INSERT INTO "checkpoints" VALUES(2,'s1:train:0','sampler_weights','one','local','s1%3Atrain%3A0/sampler_weights/one',123,1004.0,4000000000.0,0,'null');
CREATE TABLE runs (
	id VARCHAR NOT NULL, 
	session_id VARCHAR, 
	owner VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	rank INTEGER NOT NULL, 
	train_unembed BOOLEAN NOT NULL, 
	train_mlp BOOLEAN NOT NULL, 
	train_attn BOOLEAN NOT NULL, 
	created DOUBLE NOT NULL, 
	last_request DOUBLE NOT NULL, 
	user_metadata JSON NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(session_id) REFERENCES sessions (id)
);
INSERT INTO "runs" VALUES('s1:train:0','s1','local','mint/tiny',8,1,0,1,1001.0,1002.0,'{}');
INSERT INTO "runs" VALUES('ckpt_1',NULL,'key-2','mint/tiny',4,1,1,1,1001.0,1002.0,'{"source": "upload"}');
CREATE TABLE samplers (
	id VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	model_path VARCHAR, 
	ephemeral BOOLEAN NOT NULL, 
	created DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(session_id) REFERENCES sessions (id)
);
INSERT INTO "samplers" VALUES('s1:sample:0','s1','local','mint/tiny','tinker://s1:train:0/weights/one',0,1003.0);
CREATE TABLE sessions (
	id VARCHAR NOT NULL, 
	owner VARCHAR NOT NULL, 
	created DOUBLE NOT NULL, 
	tags JSON NOT NULL, 
	user_metadata JSON NOT NULL, 
	sdk_version VARCHAR, 
	display_name VARCHAR, 
	project_id VARCHAR, 
	ended VARCHAR, 
	PRIMARY KEY (id)
);
INSERT INTO "sessions" VALUES('s1','local',1000.5,'["a", "b"]','{"k": "v"}','0.36.0',NULL,NULL,'success');
CREATE INDEX ix_sessions_owner ON sessions (owner);
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE INDEX ix_runs_owner ON runs (owner);
CREATE INDEX ix_samplers_session_id ON samplers (session_id);
CREATE INDEX ix_checkpoints_owner ON checkpoints (owner);
CREATE INDEX ix_checkpoints_run_id ON checkpoints (run_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('checkpoints',3);
COMMIT;
