import { start } from "holdfast/app";

start();
