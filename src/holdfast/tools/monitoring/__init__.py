"""Files for Prometheus and Grafana: alerts with their tests, and dashboards."""
